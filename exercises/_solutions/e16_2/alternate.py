"""Another way: `match` first, text afterwards; races of exponentials; the agreement by sorting.

Sorted by p / q, the larger of the two quotients is p's for all tokens from i on and q's for those
before, so that two running sums replace the inner loop.
"""

import math
from collections.abc import Callable


def pick(dist: list[float], noise: list[float]) -> int:
    """Who arrives first: exp(-noise) / distribution is the time of each token."""
    best, first = 0, math.inf
    for token, (share, luck) in enumerate(zip(dist, noise, strict=True)):
        if share > 0 and -luck - math.log(share) < first:
            best, first = token, -luck - math.log(share)
    return best


def draft(
    small: Callable[[list[int]], list[float]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    k: int,
) -> list[int]:
    """By recursion."""
    if k == 0:
        return []
    token = pick(small(list(tokens)), noise(len(tokens)))
    return [token, *draft(small, noise, [*tokens, token], k - 1)]


def generate(
    large: Callable[[list[int], list[int]], list[list[float]]],
    propose: Callable[[list[int], int], list[int]],
    noise: Callable[[int], list[float]],
    tokens: list[int],
    count: int,
    k: int,
) -> list[int]:
    """All picks of a step, then how many of them count."""
    new: list[int] = []
    while len(new) < count:
        known = tokens + new
        most = min(k, count - len(new) - 1)
        drafts = list(propose(list(known), most)) if most else []
        dists = large(known, drafts)
        picks = [pick(dist, noise(len(known) + i)) for i, dist in enumerate(dists)]
        wrong = [i for i, token in enumerate(drafts) if picks[i] != token]
        new += picks[: wrong[0] + 1] if wrong else picks
    return new


def agreement(p: list[float], q: list[float]) -> float:
    """Sorted by the quotient of the two."""
    both = sorted(
        ((a, c) for a, c in zip(p, q, strict=True) if a > 0 and c > 0),
        key=lambda pair: pair[0] / pair[1],
    )
    above = math.fsum(p) - math.fsum(c for c, _ in both)  # only p has them: quotient infinite
    below = math.fsum(q) - math.fsum(d for _, d in both)  # only q has them: quotient 0
    tail = math.fsum(a for a, _ in both) + above
    found = 0.0
    for a, c in both:
        found += 1 / (tail / a + below / c)
        tail, below = tail - a, below + c
    return found
