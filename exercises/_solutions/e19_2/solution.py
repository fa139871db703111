"""The largest of all is the largest of the ranks' largest, so each rank may bring a single pair.

That holds for the logits, and it holds for the scores if these do not depend on who computes them.
So nothing in a score may be of the rank: the best logit is that of all ranks, and the noise is a
function of the token's number in the whole vocabulary. Numbers that belong to no token never reach
a comparison, so it does not matter what they are.
"""

import math
from collections.abc import Callable

Pair = tuple[float, int]


def share(vocab_size: int, rank: int, size: int) -> range:
    """As many tokens for each rank as the first one has; the last ranks have fewer, or none."""
    each = -(-vocab_size // size)
    return range(min(rank * each, vocab_size), min((rank + 1) * each, vocab_size))


def best(values: list[float], tokens: range) -> Pair:
    """The largest value and its token."""
    if not tokens:
        return -math.inf, -1
    own = values[: len(tokens)]
    top = max(own)
    return top, tokens[own.index(top)]


def winner(pairs: list[Pair]) -> Pair:
    """The largest value; ranks are in the order of their tokens, and max keeps the first."""
    return max(pairs, key=lambda pair: pair[0])


def choose(
    logits: list[float],
    tokens: range,
    temperature: float,
    noise: Callable[[int], float],
    gather: Callable[[Pair], list[Pair]],
) -> int:
    """The best logit of all ranks; where a token is drawn, the best score of all ranks."""
    top, token = winner(gather(best(logits, tokens)))
    if temperature == 0:
        return token
    scores = [
        (logit - top) / temperature + noise(each)
        for logit, each in zip(logits, tokens, strict=False)
    ]
    return winner(gather(best(scores, tokens)))[1]
