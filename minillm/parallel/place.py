"""Where a rank stands: its stage of the pipeline, its share of the stage's layers, its neighbours.

tp 2, pp 2         stage 0                     stage 1
share 0            rank 0 -------- pipe -----> rank 2
                     |  sums, gathers            |
share 1            rank 1 -------- pipe -----> rank 3

With data parallelism each copy of the model has such ranks; rank 0 of the copies exchange the rows
of experts, where these are shared.
"""

from dataclasses import dataclass, field

from minillm.parallel.communicator import Alone, Communicator, Traffic
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
    copy: int = 0
    experts: Communicator | None = None  # among copies that share their experts

    @property
    def split(self) -> Split:
        """Its share of each layer."""
        return Split(self.communicator.rank, self.communicator.size)

    @property
    def expert_split(self) -> Split:
        """Its share of the experts that are held whole: of its stage's, or of all copies'."""
        group = self.experts or self.communicator
        return Split(group.rank, group.size)

    @property
    def rank(self) -> int:
        """Its number among all ranks, copy by copy and stage by stage."""
        stage = self.copy * self.stage.count + self.stage.index
        return stage * self.communicator.size + self.communicator.rank

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls and bytes so far: of the communicator, to other copies' experts, and "send" to the
        next stage."""
        sent = {} if self.after is None else {"send": self.after.traffic}
        dispatched = {} if self.experts is None else self.experts.traffic
        return self.communicator.traffic | dispatched | sent

    @property
    def seconds(self) -> float:
        """Spent so far in sums, gathers and exchanges, and waiting for the stage before."""
        places = self.communicator, self.experts, self.before
        return sum(each.seconds for each in places if each is not None)

    def abort(self) -> None:
        """This rank has failed: those that wait for it raise."""
        for each in (self.communicator, self.experts, self.after):
            if each is not None:
                each.abort()

    def close(self) -> None:
        """Give back what the connections need. Closing twice is fine."""
        for each in (self.communicator, self.experts, self.before, self.after):
            if each is not None:
                each.close()


def thread_places(
    size: int,
    num_stages: int = 1,
    patience: float = PATIENCE,
    num_copies: int = 1,
    share_experts: bool = False,
) -> list[Place]:
    """Those of threads: `size` for each stage, in the order of their ranks; or one for each copy of
    the model."""
    if num_copies > 1:
        experts = ThreadGroup(num_copies, patience).communicators() if share_experts else []
        return [
            Place(Alone(), copy=copy, experts=experts[copy] if experts else None)
            for copy in range(num_copies)
        ]
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
