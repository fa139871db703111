"""e19.2: one token from several ranks. The task is in README.md."""

from collections.abc import Callable

Pair = tuple[float, int]  # a value and its token


def share(vocab_size: int, rank: int, size: int) -> range:
    """Return the tokens of a rank."""
    raise NotImplementedError("TODO e19.2: a range that ends at vocab_size or before")


def best(values: list[float], tokens: range) -> Pair:
    """Return the largest of the values that belong to `tokens`, and its token."""
    raise NotImplementedError("TODO e19.2: of equal ones the lowest token")


def winner(pairs: list[Pair]) -> Pair:
    """Return the pair with the largest value."""
    raise NotImplementedError("TODO e19.2: of equal ones the lowest token")


def choose(
    logits: list[float],
    tokens: range,
    temperature: float,
    noise: Callable[[int], float],
    gather: Callable[[Pair], list[Pair]],
) -> int:
    """Return the token that one rank with all logits would choose, on every rank.

    `logits` are those of this rank's `tokens`, possibly followed by padding.
    `gather(pair)` returns the pairs of all ranks, in rank order.
    """
    raise NotImplementedError("TODO e19.2: the best logit of all ranks, then the best score")
