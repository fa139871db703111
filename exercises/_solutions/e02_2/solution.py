"""In logits the rule needs no logarithm: it asks which logits are near the *mean* logit.

The surprise is ln Z - logit, with Z the sum of exp(logit). The entropy is the mean surprise, so it
is ln Z - (mean logit), a mean weighted with the probabilities. In the difference ln Z cancels: the
distance is |mean logit - logit|, which a kernel has at once from the softmax it needs anyway.

exp(entropy) is the perplexity: the number of equal tokens that would be as hard to guess. So
typical sampling keeps the tokens whose probability is near 1 / perplexity, on a logarithmic scale.
Among many equal candidates, a single token of 0.4 is *more* predictable than the text around it
and is rejected. Where one token has nearly everything, the entropy is near that token's surprise,
and the rule is top-p again.
"""

import math


def entropy(logits: list[float]) -> float:
    """Return the expected surprise of the next token, in nats: the sum of p * (-ln p)."""
    return sum(math.exp(-s) * s for s in surprises(logits) if s < math.inf)


def typical(logits: list[float], mass: float) -> list[int]:
    """Ids, increasing, of the fewest tokens of `mass`, in the order of their distance."""
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
