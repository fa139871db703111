"""e16.2: the same noise on both sides. The task is in README.md."""

from collections.abc import Callable


def pick(law: list[float], noise: list[float]) -> int:
    """The token with the largest ln(law) + noise; a token of probability 0 is never chosen."""
    raise NotImplementedError("TODO e16.2: the largest sum; of equal ones the smaller token")


def draft(
    small: Callable[[list[int]], list[float]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    k: int,
) -> list[int]:
    """The next `k` tokens that the small model writes after `tokens`, with the noise of their
    positions."""
    raise NotImplementedError("TODO e16.2: one token after the other")


def generate(
    large: Callable[[list[int], list[int]], list[list[float]]],
    propose: Callable[[list[int], int], list[int]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    count: int,
    k: int,
) -> list[int]:
    """`count` new tokens after `tokens`: those that the large model writes alone, in fewer steps
    where the proposer is right."""
    raise NotImplementedError("TODO e16.2: drafts, one pass, and what is kept of them")


def agreement(p: list[float], q: list[float]) -> float:
    """The probability that `pick` chooses the same token from both laws with the same noise."""
    raise NotImplementedError("TODO e16.2: a sum over the tokens that both laws have")
