"""e05.2: the largest batch of a machine. The task is in README.md."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """A model and a machine; the checks pass an object with these fields."""

    weight_bytes: int
    token_bytes: int
    context: int
    flops: int
    memory: int
    bandwidth: int  # bytes per second
    peak: int  # operations per second
    overhead: int  # microseconds


def largest_batch(costs: Costs, target: int) -> int:
    """Return the largest batch that fits into memory with a step of at most `target` us.

    Return 0 if not even one sequence is possible.
    """
    raise NotImplementedError("TODO e05.2: the limits of memory, of bytes and of operations")


def throughput(costs: Costs, batch: int) -> int:
    """Return the tokens per second of all `batch` sequences together, rounded down."""
    raise NotImplementedError("TODO e05.2: one token per sequence and step")


def compute_bound_from(costs: Costs) -> int | None:
    """Return the smallest batch whose operations take longer than its bytes, or None."""
    raise NotImplementedError(
        "TODO e05.2: find where the operations begin to take longer, if they do"
    )
