"""Another way: the lengths are sorted once, and the knee is found bit by bit.

After sorting, the sequences shorter than the window are a prefix of the list. The search keeps the
largest number of tokens whose operations do *not* take longer, and tries to add smaller and smaller
powers of two. Exact fractions compare the two times.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction


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
    projections = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = shape.hidden * (projections + 3 * shape.intermediate)
    ordered = sorted(lengths)
    whole = bisect_left(ordered, shape.window)  # so many sequences fit into the window
    seen_by_local = sum(ordered[:whole]) + shape.window * (len(ordered) - whole)
    everywhere = shape.layers // shape.global_every
    positions = everywhere * sum(ordered) + (shape.layers - everywhere) * seen_by_local
    values = (
        shape.layers * layer
        + shape.hidden * (shape.vocab + len(ordered))
        + positions * 2 * shape.kv_heads * shape.head_dim
    )
    return value_bytes * values


def knee(
    flops: Callable[[int], int],
    num_bytes: Callable[[int], int],
    peak: int,
    bandwidth: int,
    most: int,
) -> int | None:
    """Return the smallest t from 1 to `most` whose operations take longer than its bytes."""
    waits = 0  # so many tokens still wait for bytes
    for bit in reversed(range(most.bit_length())):
        more = waits + (1 << bit)
        if more > most:
            continue
        if Fraction(flops(more), peak) <= Fraction(num_bytes(more), bandwidth):
            waits = more
    return waits + 1 if waits < most else None
