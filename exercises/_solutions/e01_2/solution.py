"""Weights once per step, cache once per sequence; and a comparison of quotients without dividing.

f / peak > b / bandwidth is the same as f * bandwidth > b * peak. In Python's integers this is
exact, while two rounded quotients can be equal although the numbers differ (the checks have such a
pair). The search can also be written as bisect_left(range(1, most + 1), True, key=...).

What the result shows: a model with one global layer in six reads little more for longer texts,
because beyond the window a longer sequence costs only its global layers. And the knee of a prompt
is near the machine's ridge, peak / bandwidth: its bytes hardly depend on t, and each 16-bit weight
gives 2 * t operations for 2 bytes. On an H100 this is about 300 tokens. A shorter prompt takes as
long as one of 300, so it is worth computing several of them in one pass.
"""

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
    """Return the bytes that one decoding step of a batch reads."""
    query = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    layer = shape.hidden * (2 * query + 2 * kv + 3 * shape.intermediate)
    weights = shape.layers * layer + shape.hidden * shape.vocab
    rows = len(lengths) * shape.hidden
    far = shape.layers // shape.global_every
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
    """Return the smallest t from 1 to `most` whose operations take longer than its bytes."""
    low, high = 1, most + 1  # the answer is in low .. high, and high stands for "none"
    while low < high:
        middle = (low + high) // 2
        if flops(middle) * bandwidth > num_bytes(middle) * peak:
            high = middle
        else:
            low = middle + 1
    return low if low <= most else None
