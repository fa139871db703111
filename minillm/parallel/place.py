"""The position of a rank: its pipeline stage, its share of the stage's layers, its connections.

tp 2, pp 2         stage 0                     stage 1
share 0            rank 0 -------- pipe -----> rank 2
                     |  sums, gathers            |
share 1            rank 1 -------- pipe -----> rank 3

With data parallelism there is one rank per copy of the model; where copies share their experts, all
copies form one group that exchanges the experts' rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from minillm.api.arguments import EngineArgs
from minillm.parallel.communicator import PATIENCE, Alone, Communicator, ThreadGroup, Traffic
from minillm.parallel.pipes import Pipe
from minillm.parallel.split import Split, Stage


@dataclass(frozen=True)
class Place:
    """One rank's stage and connections.

    Attributes:
        communicator: of the ranks of its stage.
        stage: its pipeline stage.
        before, after: pipes to the neighbouring stages.
        copy: number of its copy of the model.
        experts: communicator of the copies that share their experts.
    """

    communicator: Communicator
    stage: Stage = field(default_factory=Stage)
    before: Pipe | None = None
    after: Pipe | None = None
    copy: int = 0
    experts: Communicator | None = None

    @property
    def split(self) -> Split:
        """Its share of each layer."""
        return Split(self.communicator.rank, self.communicator.size)

    @property
    def expert_split(self) -> Split:
        """Its share of the whole experts: of those of its stage, or of all copies."""
        group = self.experts or self.communicator
        return Split(group.rank, group.size)

    @property
    def rank(self) -> int:
        """Its number among all ranks, ordered by copy, stage and share."""
        stage = self.copy * self.stage.count + self.stage.index
        return stage * self.communicator.size + self.communicator.rank

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls and bytes so far: of the communicators, and "send" to the next stage."""
        sent = {} if self.after is None else {"send": self.after.traffic}
        dispatched = {} if self.experts is None else self.experts.traffic
        return self.communicator.traffic | dispatched | sent

    @property
    def seconds(self) -> float:
        """Time spent so far in collective calls and waiting for the previous stage."""
        places = self.communicator, self.experts, self.before
        return sum(place.seconds for place in places if place is not None)

    def abort(self) -> None:
        """Make ranks that wait for this one raise."""
        for link in (self.communicator, self.experts, self.after):
            if link is not None:
                link.abort()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        for link in (self.communicator, self.experts, self.before, self.after):
            if link is not None:
                link.close()


@dataclass(frozen=True)
class Topology:
    """All ranks: `num_stages` stages of `size` ranks, or `num_copies` copies of one rank each."""

    size: int = 1
    num_stages: int = 1
    num_copies: int = 1
    share_experts: bool = False

    @classmethod
    def of(cls, args: EngineArgs) -> "Topology":
        """That of an engine."""
        sizes = args.tensor_parallel_size, args.pipeline_parallel_size
        return cls(*sizes, args.data_parallel_size, args.enable_expert_parallel)

    @property
    def num_ranks(self) -> int:
        """Of all stages or copies."""
        return self.size * self.num_stages * self.num_copies

    def group(self, rank: int) -> range:
        """The ranks with which a rank makes collective calls; itself included."""
        if self.num_copies > 1:
            return range(self.num_copies) if self.share_experts else range(rank, rank + 1)
        start = rank - rank % self.size
        return range(start, start + self.size)

    def after(self, rank: int) -> int | None:
        """The rank to which a rank sends activations."""
        is_last = self.num_copies > 1 or rank + self.size >= self.num_ranks
        return None if is_last else rank + self.size

    def place(
        self, rank: int, group: Callable[[range], Communicator], pipe: Callable[[int], Pipe]
    ) -> Place:
        """A rank's place; `group` connects it to several ranks, `pipe` to one of a neighbouring
        stage."""
        ranks = self.group(rank)
        communicator = group(ranks) if len(ranks) > 1 else Alone()
        if self.num_copies > 1:
            experts = communicator if self.share_experts else None
            return Place(Alone(), copy=rank, experts=experts)
        before = pipe(rank - self.size) if rank >= self.size else None
        after = self.after(rank)
        stage = Stage(rank // self.size, self.num_stages)
        return Place(communicator, stage, before, None if after is None else pipe(after))


def thread_places(topology: Topology, patience: float = PATIENCE) -> list[Place]:
    """Those of ranks that are threads, in rank order."""
    every = range(topology.num_ranks)
    groups = {ranks: ThreadGroup(len(ranks), patience) for ranks in map(topology.group, every)}
    pipes = {rank: Pipe(patience) for rank in every}  # by the rank that sends

    def place(rank: int) -> Place:
        return topology.place(
            rank,
            lambda ranks: groups[ranks].communicators()[ranks.index(rank)],
            lambda other: pipes[min(rank, other)],
        )

    return [place(rank) for rank in every]
