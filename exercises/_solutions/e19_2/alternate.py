"""Another way: pairs are compared as (value, minus the token), so that ties need no order of ranks.

The score is a list of pairs from the start, and padding is cut off once, at the top.
"""

import math
from collections.abc import Callable

Pair = tuple[float, int]


def share(vocab_size: int, rank: int, size: int) -> range:
    """A slice of the vocabulary: a range that is cut by another."""
    each = math.ceil(vocab_size / size)
    return range(vocab_size)[rank * each : (rank + 1) * each]


def best(values: list[float], tokens: range) -> Pair:
    """The winner of a rank's own pairs."""
    own = [(value, token) for value, token in zip(values, tokens, strict=False)]
    return winner(own) if own else (-math.inf, -1)


def winner(pairs: list[Pair]) -> Pair:
    """Sorted: the largest value first, then the lowest token."""
    return sorted(pairs, key=lambda pair: (-pair[0], pair[1]))[0]


def choose(
    logits: list[float],
    tokens: range,
    temperature: float,
    noise: Callable[[int], float],
    gather: Callable[[Pair], list[Pair]],
) -> int:
    """Greedy first; noise only where there is a temperature."""
    logits = logits[: len(tokens)]
    top, token = winner(gather(best(logits, tokens)))
    if temperature > 0:
        scores = [(each - top) / temperature for each in logits]
        for place, number in enumerate(tokens):
            scores[place] += noise(number)
        token = winner(gather(best(scores, tokens)))[1]
    return token
