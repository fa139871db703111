"""e05.2: how many sequences a machine can carry. The task is in README.md."""

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
    """The largest batch that fits into memory and whose step takes at most `target` microseconds.

    0 when not even one sequence can be served.
    """
    raise NotImplementedError("TODO e05.2: what memory allows, what bytes and operations allow")


def throughput(costs: Costs, batch: int) -> int:
    """Tokens per second of all `batch` sequences together, rounded down."""
    raise NotImplementedError("TODO e05.2: one token per sequence and step")


def compute_bound_from(costs: Costs) -> int | None:
    """The smallest batch whose operations take longer than its bytes; None if there is none."""
    raise NotImplementedError("TODO e05.2: where does one ramp cross the other, if it does?")
