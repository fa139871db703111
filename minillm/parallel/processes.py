"""Ranks that are processes of their own: an executor like `RankThreads`."""

import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence

from minillm.errors import MinillmError
from minillm.execution.executor import Capacity
from minillm.execution.flight import Flight
from minillm.execution.wire import result_from_bytes
from minillm.parallel.executor import Stages, check_agreement, smallest, together
from minillm.parallel.groups import Groups
from minillm.parallel.meeting import NodeGroups
from minillm.parallel.messages import TIMES, Kind, SetUp
from minillm.parallel.rank_loop import RankLoop
from minillm.parallel.rank_process import Rank, start
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.record import RankTime

HASH_SIZE = 16  # characters of `token_hash`
START_PATIENCE = 1800.0  # seconds in which a model is loaded
STEP_PATIENCE = 300.0  # seconds for a step, and those that ranks wait for each other


class RankProcesses:
    """Ranks that are processes; they end with this object, or with this process. They are started
    on this machine, unless they have `arrived` from elsewhere.

    Raises what a rank raises that cannot be built, or EngineDeadError when one ends.
    """

    def __init__(
        self,
        set_ups: Sequence[SetUp],
        group: "Groups | NodeGroups",
        environment: Mapping[str, str],
        patience: float = STEP_PATIENCE,
        arrived: Sequence[Rank] = (),
    ):
        self.patience = patience
        bodies = [each.to_bytes() for each in set_ups]
        life, alive = os.pipe()

        def release() -> None:
            os.close(life)
            os.close(alive)
            group.close()

        def spawn(rank: int) -> Rank:
            if arrived:
                return arrived[rank]
            return start(rank, life, group.fds_of(rank), environment)

        sizes = group.size, group.num_stages, group.num_copies
        self._stages = Stages(*sizes, set_ups[0].args.step_interval)
        self._loop = RankLoop(len(set_ups), spawn, release)
        self._end = weakref.finalize(self, self._loop.stop)  # also when the interpreter ends
        self._loop.start()
        try:
            answers = self._loop.order(Kind.SET_UP, bodies, START_PATIENCE).result()
        except BaseException:  # also Ctrl-C
            self.close()
            raise
        self._capacity = smallest([Capacity(*json.loads(each)) for each in answers])

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks on this machine that it has started."""
        return [each.process.pid for each in self._loop.ranks if not each.node]

    def when_dead(self, tell: Callable[[MinillmError], None]) -> None:
        """Have `tell` called, by another thread, when a rank has failed, also between steps."""
        self._loop.when_dead = tell

    def capacity(self) -> Capacity:
        """What the smallest rank has."""
        return self._capacity

    def launch(self, plan: StepPlan) -> Flight:
        """Start a step on all ranks."""
        future = self._loop.order(Kind.PLAN, self._stages.bodies(plan), self.patience)
        flight = Flight()

        def read() -> None:
            answers = future.result()
            copies = self._stages.last([each[TIMES.size :] for each in answers])
            for each in copies:
                check_agreement([answer[:HASH_SIZE].decode() for answer in each])
            flight.result = together([result_from_bytes(each[0][HASH_SIZE:]) for each in copies])
            times = (TIMES.unpack_from(each) for each in answers)
            flight.result.ranks = [RankTime(rank, *each) for rank, each in enumerate(times)]
            self._stages.note(plan, flight.result)

        flight.reads.append(read)
        return flight

    def reset(self) -> None:
        """Forget all sequences: after the steps that were launched, before those to come."""
        self._stages.forget()
        self._loop.order(Kind.RESET, [b""], self.patience)

    def stats(self) -> dict[str, int]:
        """Bytes of all ranks together."""
        found: dict[str, int] = {}
        for answer in self._loop.order(Kind.STATS, [b""], self.patience).result():
            for name, value in json.loads(answer).items():
                found[name] = found.get(name, 0) + value
        return found

    def close(self) -> None:
        """End the processes. Closing twice is fine."""
        self._end()
