"""Another way: the entropy in one pass, and two queues that lead away from it.

The pass keeps the largest logit so far and rescales when a larger one is found, so it needs no list
of probabilities. Ranked by logit, the tokens above and below the entropy form two sorted queues;
merging them gives the order of the distances.
"""

import heapq
import math
from functools import reduce

State = tuple[float, float, float]


def absorb(state: State, x: float) -> State:
    """(peak, sum of exp(x - peak), sum of exp(x - peak) * (x - peak)) with one more logit."""
    peak, total, weighted = state
    if x == -math.inf:
        return state
    if x <= peak:
        w = math.exp(x - peak)
        return peak, total + w, weighted + w * (x - peak)
    if peak == -math.inf:
        return x, 1.0, 0.0
    w = math.exp(peak - x)
    return x, total * w + 1, (weighted + total * (peak - x)) * w


def fold(logits: list[float]) -> State:
    """The three sums over all logits."""
    return reduce(absorb, logits, (-math.inf, 0.0, 0.0))


def entropy(logits: list[float]) -> float:
    """The expected surprise of the next token, in nats: ln Z less the expected logit."""
    _, total, weighted = fold(logits)
    return math.log(total) - weighted / total


def typical(logits: list[float], mass: float) -> list[int]:
    """Ids, increasing, of the fewest tokens that hold `mass`, the nearest to the entropy first."""
    peak, total, weighted = fold(logits)
    middle = weighted / total  # a token lies as far from it as its surprise from the entropy
    found = [(x - peak, i) for i, x in enumerate(logits) if x > -math.inf]
    likely = sorted((x - middle, i) for x, i in found if x >= middle)
    unlikely = sorted((middle - x, i) for x, i in found if x < middle)
    kept: list[int] = []
    reached = 0.0
    for _, i in heapq.merge(likely, unlikely):
        if mass < 1 and reached >= mass * total:
            break
        kept.append(i)
        reached += math.exp(logits[i] - peak)
    return sorted(kept)
