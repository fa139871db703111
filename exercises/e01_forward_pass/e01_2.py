"""e01.2: the bytes of a step, and where they stop mattering. The task is in README.md."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of config.json that matter here; the checks pass an object with these fields.

    Layer i (from 0) sees everything when i + 1 is a multiple of `global_every`; the other layers
    see the last `window` positions only.
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
    """Bytes read by one decoding step of a batch: weights once, cached positions per sequence.

    `lengths` has one entry per sequence: the positions to attend to, the new token's included.
    """
    raise NotImplementedError("TODO e01.2: weights once, then the positions that each layer reads")


def knee(
    flops: Callable[[int], int],
    num_bytes: Callable[[int], int],
    peak: int,
    bandwidth: int,
    most: int,
) -> int | None:
    """The smallest number of tokens, 1 to `most`, whose operations take longer than its bytes.

    ``flops(t)`` operations at `peak` per second against ``num_bytes(t)`` bytes at `bandwidth` per
    second; None when there is no such number. Equal times are not longer.
    """
    raise NotImplementedError("TODO e01.2: compare two quotients without dividing, then search")
