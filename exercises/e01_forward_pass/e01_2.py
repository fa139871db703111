"""e01.2: the bytes of a step, and the knee. The task is in README.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of config.json that are needed; the checks pass an object with these fields.

    Layer i (from 0) reads all positions if i + 1 is a multiple of `global_every`. Every other
    layer reads only the last `window` positions.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    window: int
    global_every: int


def step_bytes(shape: Shape, lengths: Sequence[int], value_bytes: int = 2) -> int:
    """Return the bytes that one decoding step of a batch reads.

    `lengths` has one entry per sequence: the number of its positions, including the new token.
    """
    raise NotImplementedError("TODO e01.2: weights once, then the positions that each layer reads")


def knee(
    flops: Callable[[int], int],
    num_bytes: Callable[[int], int],
    peak: int,
    bandwidth: int,
    most: int,
) -> int | None:
    """Return the smallest t from 1 to `most` whose operations take longer than its bytes.

    The machine computes ``flops(t)`` operations at `peak` per second, and reads ``num_bytes(t)``
    bytes at `bandwidth` per second. Return None if there is no such t.
    """
    raise NotImplementedError("TODO e01.2: compare two quotients without dividing, then search")
