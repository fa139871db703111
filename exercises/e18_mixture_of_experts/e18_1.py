"""e18.1: dispatch and combine. The task is in README.md."""

from collections.abc import Callable

Rows = list[list[float]]
Pairs = list[tuple[int, float]]


def route(scores: list[float], bias: list[float], k: int) -> Pairs:
    """Return the k experts of a token and their weights, best first."""
    raise NotImplementedError("TODO e18.1: choose by score + bias, weigh by score")


def dispatch(routes: list[Pairs], num_experts: int) -> list[Pairs]:
    """Return for each expert its tokens with their weights."""
    raise NotImplementedError("TODO e18.1: from experts per token to tokens per expert")


def combine(x: Rows, batches: list[Pairs], run: Callable[[int, Rows], Rows]) -> Rows:
    """Return for each token the weighted sum of the outputs of its experts.

    `run(expert, rows)` applies an expert to rows and returns as many rows.
    """
    raise NotImplementedError("TODO e18.1: run every expert once, add up per token")
