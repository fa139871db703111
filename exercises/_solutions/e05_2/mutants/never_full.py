"""You want a byte to spare: memory that is full to the last byte is a fit."""

from dataclasses import dataclass
from fractions import Fraction

MICRO = 1_000_000


@dataclass(frozen=True)
class Costs:
    """A model and a machine."""

    weight_bytes: int
    token_bytes: int
    context: int
    flops: int
    memory: int
    bandwidth: int  # bytes per second
    peak: int  # operations per second
    overhead: int  # microseconds


def largest_batch(costs: Costs, target: int) -> int:
    """The largest batch that fits and whose step takes at most `target` microseconds."""
    cache = costs.context * costs.token_bytes
    time = target - costs.overhead
    stored = (costs.memory - costs.weight_bytes - 1) // cache
    read = (time * costs.bandwidth // MICRO - costs.weight_bytes) // cache
    computed = time * costs.peak // MICRO // costs.flops
    return max(0, min(stored, read, computed))


def throughput(costs: Costs, batch: int) -> int:
    """Tokens per second of all `batch` sequences together, rounded down."""
    num_bytes = costs.weight_bytes + batch * costs.context * costs.token_bytes
    reading = Fraction(num_bytes, costs.bandwidth)
    computing = Fraction(batch * costs.flops, costs.peak)
    return batch // (Fraction(costs.overhead, MICRO) + max(reading, computing))


def compute_bound_from(costs: Costs) -> int | None:
    """The smallest batch whose operations take longer than its bytes; None if there is none."""
    cache = costs.context * costs.token_bytes
    gain = costs.flops * costs.bandwidth - cache * costs.peak  # of operations, per sequence
    if gain <= 0:
        return None
    return costs.weight_bytes * costs.peak // gain + 1
