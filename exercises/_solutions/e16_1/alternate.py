"""Another way: count the kept drafts first; the distribution of the last token follows from their
number.

`takewhile` goes over the places that pass. Instead of dividing the residual, multiply u by its
sum.
"""

from itertools import accumulate, takewhile


def accept_probability(p: list[float], q: list[float], token: int) -> float:
    """1 where the large model likes the token at least as much."""
    return 1.0 if p[token] >= q[token] else p[token] / q[token]


def residual(p: list[float], q: list[float]) -> list[float]:
    """The part of p above q."""
    gap = [a - b if a > b else 0.0 for a, b in zip(p, q, strict=True)]
    return [each / sum(gap) for each in gap] if any(gap) else p[:]


def verify(
    targets: list[list[float]],
    dists: list[list[float]],
    drafts: list[int],
    coins: list[float],
    u: float,
) -> list[int]:
    """Count, choose a distribution, draw."""

    def stands(place: int) -> bool:
        token = drafts[place]
        return coins[place] < accept_probability(targets[place], dists[place], token)

    count = len(list(takewhile(stands, range(len(drafts)))))
    dist = targets[count]
    if count < len(drafts):
        dist = residual(dist, dists[count])
    sums = list(accumulate(dist))
    end = next((token for token, total in enumerate(sums) if total > u), None)
    if end is None:
        end = max(token for token, share in enumerate(dist) if share > 0)
    return [*drafts[:count], end]
