"""e19.1: one layer on several ranks. The task is in README.md."""

from collections.abc import Callable

Matrix = list[list[int]]


def heads(rank: int, size: int, num_heads: int, num_kv_heads: int) -> tuple[list[int], list[int]]:
    """Return the query heads and the KV heads of a rank."""
    raise NotImplementedError("TODO e19.1: a share of the query heads, and the KV heads they read")


def shard(layer: dict[str, list], rank: int, size: int) -> dict[str, list]:
    """Return the part of a layer that a rank holds, under the same four names."""
    raise NotImplementedError("TODO e19.1: rows of gate and of up, columns of down")


def forward(
    mine: dict[str, list], x: Matrix, rank: int, add_up: Callable[[Matrix], Matrix]
) -> Matrix:
    """Return the output of the whole layer for the rows of `x`, with one sum.

    `mine` is the result of `shard` for this rank. `add_up(part)` takes a matrix of each rank and
    returns their sum to all ranks.
    """
    raise NotImplementedError(
        "TODO e19.1: this rank's units and part of the output, the sum, the bias"
    )
