"""Another way: a heap returns the tokens best first, and no probability is normalised.

A token is kept if the weights *before* it are less than `top_p` of the total, which is the same as
keeping the fewest that reach it. The draw multiplies `u` by the total and bisects.
"""

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate, islice


def best_first(logits: list[float]) -> Iterator[int]:
    """Ids of the tokens that are not forbidden, the best first, each only when it is asked for."""
    heap = [(-x, i) for i, x in enumerate(logits) if x > -math.inf]
    heapq.heapify(heap)
    while heap:
        yield heapq.heappop(heap)[1]


def weights(logits: list[float], ids: list[int], temperature: float) -> list[float]:
    """exp of how far each of `ids` lies below the first of them, which therefore weighs 1."""
    return [math.exp((logits[i] - logits[ids[0]]) / temperature) for i in ids]


def keep(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """Return the ids that may be drawn, best first; of equal logits the smaller id."""
    limit = 1 if temperature == 0 else top_k or None
    ids = list(islice(best_first(logits), limit))
    if top_p == 1 or temperature == 0:
        return ids
    sums = list(accumulate(weights(logits, ids, temperature), initial=0.0))
    enough = top_p * sums[-1]
    return [i for i, before in zip(ids, sums, strict=False) if before < enough]


def choose(logits: list[float], temperature: float, top_k: int, top_p: float, u: float) -> int:
    """Return the first kept token at which the sum of probabilities exceeds `u`."""
    ids = keep(logits, temperature, top_k, top_p)
    if len(ids) == 1:
        return ids[0]
    sums = list(accumulate(weights(logits, ids, temperature)))
    return ids[min(bisect_right(sums, u * sums[-1]), len(ids) - 1)]
