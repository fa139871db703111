"""Two straight lines, each solved for the batch; integers all the way.

A number of microseconds times a rate per second, over a million, rounded down, is the number of
whole bytes or operations that fit into it. Rounding down twice in a row is the same as once, so
three integer divisions say what memory, reading and computing allow, and the smallest one decides.

The bracket of `compute_bound_from` is worth a look. flops / peak > cache / bandwidth says that a
sequence by itself, without any weights, takes longer to compute than to read. With a long context
it does not, and then no batch is large enough to be bound by operations: what a batch shares are
the weights alone.

The published "835 %" divides tokens per second, times the weights, by the bandwidth. That counts
the weights once per sequence: at a batch of 32 it is up to 32 times what was read.
"""

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
    stored = (costs.memory - costs.weight_bytes) // cache
    read = (time * costs.bandwidth // MICRO - costs.weight_bytes) // cache
    computed = time * costs.peak // MICRO // costs.flops
    return max(0, min(stored, read, computed))


def throughput(costs: Costs, batch: int) -> int:
    """Return the tokens per second of all `batch` sequences together, rounded down."""
    num_bytes = costs.weight_bytes + batch * costs.context * costs.token_bytes
    reading = Fraction(num_bytes, costs.bandwidth)
    computing = Fraction(batch * costs.flops, costs.peak)
    return batch // (Fraction(costs.overhead, MICRO) + max(reading, computing))


def compute_bound_from(costs: Costs) -> int | None:
    """Return the smallest batch whose operations take longer than its bytes, or None."""
    cache = costs.context * costs.token_bytes
    gain = costs.flops * costs.bandwidth - cache * costs.peak  # of operations, per sequence
    if gain <= 0:
        return None
    return costs.weight_bytes * costs.peak // gain + 1
