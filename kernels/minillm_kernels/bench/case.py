"""What a benchmark of one kernel consists of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Call = Callable[[int], object]
CACHE = 120 << 20  # bytes that a GPU's cache is sure not to hold: twice an H200's


def sets_beyond_cache(num_bytes: int) -> int:
    """Input sets of so many bytes that together leave the cache, one more than it takes."""
    return 1 + -(-CACHE // num_bytes)


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

    def call(self, function: Callable[..., object], *more: Any) -> Call:
        """A call of `function` with one set, and `more` behind it."""
        return lambda number: function(self[number], *more)


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
    bound: Literal["copy", "read", "matmul", "latency"] = "copy"
    peers: Mapping[str, Call] = field(default_factory=dict)
    num_sets: int = 1
    target: float | None = None
    peer_targets: Mapping[str, float] = field(default_factory=dict)
