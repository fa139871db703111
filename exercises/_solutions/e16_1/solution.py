"""The coins decide how far the drafts go; then there is exactly one draw, and only its distribution
differs.

A draft x is kept with probability min(1, p(x) / q(x)), so x comes from a kept draft with
probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)). What is missing to p(x) is max(0, p(x) -
q(x)), and its sum over x is just the probability of a rejection. So the residual fills the gap, and
the token has the distribution p, whatever q was. Nothing guards the quotient: a token that was
drawn has q above 0, and with q + 1e-8 a draft of the large model itself would be rejected now and
then, where no residual is left.
"""


def accept_probability(p: list[float], q: list[float], token: int) -> float:
    """With which probability a draft of distribution `q` is kept, where the large model's is
    `p`."""
    return min(1.0, p[token] / q[token])


def residual(p: list[float], q: list[float]) -> list[float]:
    """What `p` has more than `q`, as shares of their sum; where nothing is left, `p`."""
    more = [max(0.0, a - b) for a, b in zip(p, q, strict=True)]
    total = sum(more)
    if total == 0:
        return list(p)
    return [each / total for each in more]


def verify(
    targets: list[list[float]],
    dists: list[list[float]],
    drafts: list[int],
    coins: list[float],
    u: float,
) -> list[int]:
    """The drafts before the first rejected one, and a token drawn with `u`."""
    kept: list[int] = []
    last = targets[len(drafts)]
    for place, token in enumerate(drafts):
        if coins[place] < accept_probability(targets[place], dists[place], token):
            kept.append(token)
        else:
            last = residual(targets[place], dists[place])
            break
    return [*kept, draw(last, u)]


def draw(dist: list[float], u: float) -> int:
    """The first token at which the running sum of the distribution is greater than `u`."""
    total, last = 0.0, 0
    for token, share in enumerate(dist):
        total += share
        if total > u:
            return token
        if share > 0:
            last = token
    return last  # the sum is below 1 by rounding
