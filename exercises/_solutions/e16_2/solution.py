"""A token is a function of the text before it and of its position; so it may be computed early.

`generate` asks the large model for all distributions behind the drafts at once, and picks at each
place with the noise of that position. The picks are right as long as the drafts before them are,
and the first pick that differs from its draft is right, too. Nothing is asked of the proposer but
tokens: it changes how many steps there are, and no token.

In `agreement`, ln p + g is an exponential race: with noise g = -ln E, the token with the smallest
E / p wins. Both distributions choose i exactly if E_j > E_i max(p_j / p_i, q_j / q_i) for every
other j.
"""

import math
from collections.abc import Callable


def pick(dist: list[float], noise: list[float]) -> int:
    """The token with the largest ln(distribution) + noise; of equal ones the smaller."""
    scores = [math.log(p) + g if p > 0 else -math.inf for p, g in zip(dist, noise, strict=True)]
    return scores.index(max(scores))


def draft(
    small: Callable[[list[int]], list[float]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    k: int,
) -> list[int]:
    """One token after the other, each at the position where the text ends."""
    text = list(tokens)
    for _ in range(k):
        text.append(pick(small(text), noise(len(text))))
    return text[len(tokens) :]


def generate(
    large: Callable[[list[int], list[int]], list[list[float]]],
    propose: Callable[[list[int], int], list[int]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    count: int,
    k: int,
) -> list[int]:
    """Steps until there are `count` new tokens."""
    text, end = list(tokens), len(tokens) + count
    while len(text) < end:
        room = min(k, end - len(text) - 1)
        drafts = propose(text, room) if room > 0 else []
        dists = large(text, drafts)
        start = len(text)
        for place, dist in enumerate(dists):
            token = pick(dist, noise(start + place))
            text.append(token)
            if place < len(drafts) and token != drafts[place]:
                break
    return text[len(tokens) :]


def agreement(p: list[float], q: list[float]) -> float:
    """The sum over tokens of 1 / sum_j max(p_j / p_i, q_j / q_i)."""
    total = 0.0
    for a, c in zip(p, q, strict=True):
        if a > 0 and c > 0:
            total += 1 / sum(max(b / a, d / c) for b, d in zip(p, q, strict=True))
    return total
