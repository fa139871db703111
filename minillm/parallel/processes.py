"""An executor of ranks that are processes."""

import json
import weakref
from collections.abc import Callable, Sequence

from minillm.errors import MinillmError
from minillm.execution.executor import Capacity
from minillm.parallel.executor import Answer, Ranks, answer_from_bytes
from minillm.parallel.messages import Kind, SetUp
from minillm.parallel.place import Topology
from minillm.parallel.rank_loop import RankLoop
from minillm.parallel.rank_process import Rank

START_PATIENCE = 1800.0  # seconds in which a model is loaded
STEP_PATIENCE = 300.0  # seconds for a step
# Ranks wait less for each other than the driver waits for them, and say which of them is missing.
CALL_PATIENCE = 0.8  # of that time


class RankProcesses(Ranks):
    """Ranks that are processes; they end with this object, or with this process.

    Args:
        set_ups: one per rank.
        spawn: returns a rank, started here or connected from elsewhere.
        release: called once all ranks have ended.

    Raises:
        MinillmError: what a rank raises that cannot be built; EngineDeadError when one ends.
    """

    def __init__(
        self, set_ups: Sequence[SetUp], spawn: Callable[[int], Rank], release: Callable[[], None]
    ):
        self.patience, args = STEP_PATIENCE, set_ups[0].args
        super().__init__(Topology.of(args), args.step_interval)
        bodies = [set_up.to_bytes() for set_up in set_ups]
        self._loop = RankLoop(len(set_ups), spawn, release)
        self._end = weakref.finalize(self, self._loop.stop)  # also when the interpreter ends
        self._loop.start()
        try:
            answers = self._loop.order(Kind.SET_UP, bodies, START_PATIENCE).result()
        except BaseException:  # also Ctrl-C
            self.close()
            raise
        self._capacities = [Capacity(*json.loads(answer)) for answer in answers]

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that this process has started."""
        return [rank.process.pid for rank in self._loop.ranks if rank.process is not None]

    def when_dead(self, tell: Callable[[MinillmError], None]) -> None:
        """Have `tell` called, by another thread, when a rank has failed, also between steps."""
        self._loop.when_dead = tell

    def reset(self) -> None:
        super().reset()
        self._loop.order(Kind.RESET, [b""], self.patience)

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._end()

    def _execute(self, bodies: Sequence[bytes]) -> Callable[[], list[Answer]]:
        future = self._loop.order(Kind.PLAN, bodies, self.patience)
        return lambda: list(map(answer_from_bytes, future.result()))

    def _stats(self) -> list[dict[str, int]]:
        answers = self._loop.order(Kind.STATS, [b""], self.patience).result()
        return [json.loads(answer) for answer in answers]
