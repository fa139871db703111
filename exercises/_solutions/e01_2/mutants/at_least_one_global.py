"""You count one global layer at least: with fewer layers than global_every there is none."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """The numbers of config.json that matter here."""

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
    """Bytes read by one decoding step of a batch: weights once, cached positions per sequence."""
    query = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * query + 2 * kv + 3 * shape.intermediate)
    weights = shape.layers * layer + shape.hidden * shape.vocab
    rows = len(lengths) * shape.hidden
    far = max(1, shape.layers // shape.global_every)
    near = shape.layers - far
    positions = sum(far * n + near * min(n, shape.window) for n in lengths)
    return value_bytes * (weights + rows + positions * 2 * kv)


def knee(
    flops: Callable[[int], int],
    num_bytes: Callable[[int], int],
    peak: int,
    bandwidth: int,
    most: int,
) -> int | None:
    """The smallest number of tokens, 1 to `most`, whose operations take longer than its bytes."""
    low, high = 1, most + 1  # the answer is in low .. high, and high stands for "none"
    while low < high:
        middle = (low + high) // 2
        if flops(middle) * bandwidth > num_bytes(middle) * peak:
            high = middle
        else:
            low = middle + 1
    return low if low <= most else None
