"""e19.1: one layer on several ranks. The task is in README.md."""

from collections.abc import Callable

Matrix = list[list[int]]


def heads(rank: int, size: int, num_heads: int, num_kv_heads: int) -> tuple[list[int], list[int]]:
    """The query heads and the KV heads that a rank holds."""
    raise NotImplementedError("TODO e19.1: a share of the query heads, and what they read")


def shard(layer: dict[str, list], rank: int, size: int) -> dict[str, list]:
    """What a rank holds of a layer: the same four names, smaller."""
    raise NotImplementedError("TODO e19.1: rows of gate and of up, columns of down")


def forward(
    mine: dict[str, list], x: Matrix, rank: int, add_up: Callable[[Matrix], Matrix]
) -> Matrix:
    """The layer's output for the rows of `x`, on every rank, with one sum.

    `mine` is what `shard` returned for this rank. `add_up(part)` takes a matrix of each rank and
    returns their sum to all of them.
    """
    raise NotImplementedError("TODO e19.1: own units, own part of the output, the sum, the bias")
