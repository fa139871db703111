"""e16.2: the same noise on both sides. The task is in README.md."""

from collections.abc import Callable


def pick(dist: list[float], noise: list[float]) -> int:
    """Return the token with the largest ln(distribution) + noise; never one of probability 0."""
    raise NotImplementedError("TODO e16.2: the largest sum; of equal ones the smaller token")


def draft(
    small: Callable[[list[int]], list[float]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    k: int,
) -> list[int]:
    """Return the next `k` tokens that the small model writes after `tokens`, with the noise of
    their positions."""
    raise NotImplementedError("TODO e16.2: one token after the other")


def generate(
    large: Callable[[list[int], list[int]], list[list[float]]],
    propose: Callable[[list[int], int], list[int]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    count: int,
    k: int,
) -> list[int]:
    """Return the `count` tokens that the large model writes after `tokens`, in fewer steps where
    the proposer is right."""
    raise NotImplementedError("TODO e16.2: drafts, one pass, and the tokens that are kept")


def agreement(p: list[float], q: list[float]) -> float:
    """Return the probability that `pick` chooses the same token from both distributions."""
    raise NotImplementedError("TODO e16.2: a sum over the tokens that both distributions allow")
