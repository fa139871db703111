"""The inverse of the running sum: one number `u` draws from any list of probabilities.

This draw and the Gumbel trick of chapter 02 have the same distribution, but use random numbers
differently. Here one number decides, so the tokens need an order and a running sum. There every
token has its own number, which suits a GPU and lets a kernel draw without sorting.

The order has a use as well. The best token comes first, so a lower temperature moves each border to
the right, and for the same `u` the choice can only move up the ranking. Two settings can therefore
be compared with the same `u`. The last line is needed: seven probabilities of 1/7 sum to
0.9999999999999998, and `u` may be larger than that.
"""

import math


def keep(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """Return the ids that may be drawn, best first; of equal logits the smaller id."""
    ids = [token for token, logit in enumerate(logits) if logit > -math.inf]
    ids.sort(key=lambda token: -logits[token])  # stable: equal logits keep the order of their ids
    if temperature == 0:
        return ids[:1]
    if top_k > 0:
        ids = ids[:top_k]
    if top_p == 1:
        return ids
    reached = 0.0
    for number, share in enumerate(shares(logits, ids, temperature), 1):
        reached += share
        if reached >= top_p:
            return ids[:number]
    return ids


def choose(logits: list[float], temperature: float, top_k: int, top_p: float, u: float) -> int:
    """Return the first kept token at which the sum of probabilities exceeds `u`."""
    ids = keep(logits, temperature, top_k, top_p)
    reached = 0.0
    for token, share in zip(ids, shares(logits, ids, temperature), strict=True):
        reached += share
        if u < reached:
            return token
    return ids[-1]


def shares(logits: list[float], ids: list[int], temperature: float) -> list[float]:
    """How `ids`, best first, share the probability among themselves."""
    if len(ids) == 1:  # also at temperature 0
        return [1.0]
    weights = [math.exp((logits[token] - logits[ids[0]]) / temperature) for token in ids]
    total = sum(weights)
    return [weight / total for weight in weights]
