"""Where a rank stands: its stage of the pipeline, its share of the stage's layers, its neighbours.

tp 2, pp 2         stage 0                     stage 1
share 0            rank 0 -------- pipe -----> rank 2
                     |  sums, gathers            |
share 1            rank 1 -------- pipe -----> rank 3
"""

from dataclasses import dataclass, field

from minillm.parallel.communicator import Communicator, Traffic
from minillm.parallel.pipes import Pipe, ThreadPipe
from minillm.parallel.split import Split, Stage
from minillm.parallel.threads import PATIENCE, ThreadGroup


@dataclass(frozen=True)
class Place:
    """One rank's. The communicator is that of its stage; ends of pipes stand where there are
    neighbours."""

    communicator: Communicator
    stage: Stage = field(default_factory=Stage)
    before: Pipe | None = None
    after: Pipe | None = None

    @property
    def split(self) -> Split:
        """Its share of each layer."""
        return Split(self.communicator.rank, self.communicator.size)

    @property
    def rank(self) -> int:
        """Its number among all ranks, stage by stage."""
        return self.stage.index * self.communicator.size + self.communicator.rank

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls and bytes so far: of the communicator, and "send" to the next stage."""
        sent = {} if self.after is None else {"send": self.after.traffic}
        return self.communicator.traffic | sent

    @property
    def seconds(self) -> float:
        """Spent so far in sums and gathers, and waiting for the stage before."""
        return self.communicator.seconds + (self.before.seconds if self.before else 0.0)

    def abort(self) -> None:
        """This rank has failed: those that wait for it raise."""
        self.communicator.abort()
        if self.after is not None:
            self.after.abort()

    def close(self) -> None:
        """Give back what the connections need. Closing twice is fine."""
        for each in (self.communicator, self.before, self.after):
            if each is not None:
                each.close()


def thread_places(size: int, num_stages: int = 1, patience: float = PATIENCE) -> list[Place]:
    """Those of threads: `size` for each stage, in the order of their ranks."""
    groups = [ThreadGroup(size, patience).communicators() for _ in range(num_stages)]
    pipes = [[ThreadPipe(patience) for _ in range(size)] for _ in range(num_stages - 1)]
    return [
        Place(
            communicator,
            Stage(index, num_stages),
            pipes[index - 1][communicator.rank] if index else None,
            pipes[index][communicator.rank] if index < num_stages - 1 else None,
        )
        for index, group in enumerate(groups)
        for communicator in group
    ]
