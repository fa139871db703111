"""Another way: write the time of a step as a fraction, and search for the borders.

A larger batch never makes a step shorter, and it never needs less memory. A batch that is bound by
operations stays so when it grows. So each answer is the place where a sequence of no and yes
changes. Doubling until it is passed, and then halving, takes some thirty tests for a billion.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class Costs:
    """A model and a machine."""

    weight_bytes: int
    token_bytes: int
    context: int
    flops: int
    memory: int
    bandwidth: int
    peak: int
    overhead: int


def first(true_from: Callable[[int], bool]) -> int:
    """The smallest number, at least 1, for which the answer is yes; it is so for all larger."""
    high = 1
    while not true_from(high):
        high *= 2
    low = high // 2  # no, or 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if true_from(middle) else (middle, high)
    return high


def held(costs: Costs, batch: int) -> int:
    """Bytes in memory, all of which a step reads."""
    return costs.weight_bytes + batch * costs.context * costs.token_bytes


def transfer(costs: Costs, batch: int) -> Fraction:
    """Microseconds that the bytes of a step take."""
    return Fraction(held(costs, batch) * 10**6, costs.bandwidth)


def compute(costs: Costs, batch: int) -> Fraction:
    """Microseconds that the operations of a step take."""
    return Fraction(batch * costs.flops * 10**6, costs.peak)


def step(costs: Costs, batch: int) -> Fraction:
    """Microseconds of a step."""
    return costs.overhead + max(transfer(costs, batch), compute(costs, batch))


def largest_batch(costs: Costs, target: int) -> int:
    """One less than the smallest batch that is too large for the memory or the target."""
    return first(lambda b: held(costs, b) > costs.memory or step(costs, b) > target) - 1


def throughput(costs: Costs, batch: int) -> int:
    """Tokens per second of all sequences together, rounded down."""
    return int(batch * 10**6 / step(costs, batch))


def compute_bound_from(costs: Costs) -> int | None:
    """Return the smallest batch whose operations take longer than its bytes, or None."""
    growth = transfer(costs, 2) - transfer(costs, 1)
    if compute(costs, 1) <= growth:
        return None  # each sequence adds as much to the bytes: what the weights take stays
    return first(lambda b: compute(costs, b) > transfer(costs, b))
