"""You sorted the list you were given: it is the caller's, and a token's id is its place in it."""

import math


def entropy(logits: list[float]) -> float:
    """The expected surprise of the next token, in nats: the sum of p * (-ln p)."""
    return sum(math.exp(-s) * s for s in surprises(logits) if s < math.inf)


def typical(logits: list[float], mass: float) -> list[int]:
    """Ids, increasing, of the fewest tokens of `mass`, in the order of their distance."""
    logits.sort(reverse=True)
    surprise, expected = surprises(logits), entropy(logits)
    order = [token for token, s in enumerate(surprise) if s < math.inf]
    order.sort(key=lambda token: abs(surprise[token] - expected))  # stable: the smaller id first
    if mass == 1:
        return sorted(order)
    reached = 0.0
    for number, token in enumerate(order, 1):
        reached += math.exp(-surprise[token])
        if reached >= mass:
            return sorted(order[:number])
    return sorted(order)


def surprises(logits: list[float]) -> list[float]:
    """-ln p of each token; infinite where it is forbidden."""
    best = max(logits)
    log_total = best + math.log(sum(math.exp(logit - best) for logit in logits))
    return [log_total - logit for logit in logits]
