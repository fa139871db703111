"""What a benchmark of one kernel consists of."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

Call = Callable[[int], object]
Bound = Literal["copy", "read", "matmul", "latency"]
CACHE = 120 << 20  # bytes that a GPU's cache is sure not to hold: twice an H200's


@dataclass(frozen=True)
class Measurement:
    """One kernel at one size, with what bounds it and who else computes the same.

    Attributes:
        family: the kernel file.
        name: what is computed, at which size.
        run: one call, on the input set of this number (from 0 to `num_sets` - 1). Sets are rotated
            so that together they are larger than the GPU's cache.
        num_bytes: that must cross the memory bus in one call.
        num_flops: matrix operations of one call, a multiply-add being two.
        bound: the ceiling that a perfect kernel would meet. "latency" is for calls so small that
            neither counts.
        peers: other implementations of the same, by name; one that cannot run raises.
        target: wanted share of the ceiling; for "latency", microseconds.
        peer_targets: wanted ratio, peer's time over ours.
    """

    family: str
    name: str
    run: Call
    num_bytes: int
    num_flops: int = 0
    bound: Bound = "copy"
    peers: Mapping[str, Call] = field(default_factory=dict)
    num_sets: int = 1
    target: float | None = None
    peer_targets: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Size(ABC):
    """The sizes of a measurement of a family, whose module has `SIZES` and, for a CPU, `TINY`.

    What has the name of a field of `Measurement` becomes that.
    """

    target: float | None = None
    peer_targets: Mapping[str, float] = field(default_factory=dict)

    @property
    @abstractmethod
    def name(self) -> str:
        """What is computed, at which size."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """That must cross the memory bus in one call."""

    @property
    def num_flops(self) -> int:
        """Matrix operations of one call."""
        return 0

    @property
    def bound(self) -> Bound:
        """The ceiling."""
        return "copy"

    @property
    def num_sets(self) -> int:
        """Input sets that together leave the cache, one more than it takes; two for what is in the
        cache anyway, where its producer left it."""
        return 2 if self.bound == "latency" else 1 + -(-CACHE // self.num_bytes)

    @abstractmethod
    def make(self, device: str, number: int) -> Any:
        """An input set."""

    @abstractmethod
    def run(self, inputs: Any) -> object:
        """One call of the kernel."""

    @abstractmethod
    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """Calls of others with the same inputs."""

    def sets(self, device: str) -> "Sets":
        """The input sets; two for a CPU."""
        return Sets(
            partial(self.make, device), min(self.num_sets, 2) if device == "cpu" else self.num_sets
        )

    def measurement(self, family: str, device: str) -> Measurement:
        """What this module is about."""
        sets = self.sets(device)
        return Measurement(
            family, self.name, sets.call(self.run), self.num_bytes, self.num_flops, self.bound,
            {name: sets.call(peer) for name, peer in self.peers().items()}, sets.count,
            self.target, self.peer_targets,
        )  # fmt: skip


class Sets:
    """`count` input sets, made when the first is needed: a list of measurements costs no memory.
    `make` gets the number of a set."""

    def __init__(self, make: Callable[[int], Any], count: int):
        self.make, self.count, self.made = make, count, list[Any]()

    def __getitem__(self, number: int) -> Any:
        """One set."""
        if not self.made:
            self.made = [self.make(each) for each in range(self.count)]
        return self.made[number % self.count]

    def call(self, function: Callable[[Any], object]) -> Call:
        """A call of `function` with one set."""
        return lambda number: function(self[number])
