"""Another way: the 128 is taken off each code, sums grow position by position."""

from math import exp, inf, isinf, nan


def nearest(values: list[float]) -> tuple[list[int], float]:
    """Codes and step; a half is rounded away from zero."""
    step = max((abs(value) for value in values), default=0.0) / 127
    if step == 0:
        return [0] * len(values), 0.0
    codes = []
    for value in values:
        size = int(abs(value) / step + 0.5)
        codes.append(size if value >= 0 else -size)
    return codes, step


def quantize_query(query: list[float]) -> tuple[list[int], float]:
    """As weights, with a sign."""
    return nearest(query)


def score_sums(query_codes: list[int], stored: list[list[int]]) -> list[int]:
    """One product after the other."""
    sums = []
    for row in stored:
        total = 0
        for place, code in enumerate(query_codes):
            total += code * (row[place] - 128)
        sums.append(total)
    return sums


def weight_codes(weighted: list[float]) -> tuple[list[int], float]:
    """As queries, without a sign."""
    return nearest(weighted)


def value_sums(codes: list[int], values: list[list[int]]) -> list[int]:
    """Add a row times its weight."""
    totals = [0] * len(values[0])
    for weight, row in zip(codes, values, strict=True):
        totals = [total + weight * code for total, code in zip(totals, row, strict=True)]
    return totals


def attend(
    query: list[float],
    stored: list[list[int]],
    key_scales: list[float],
    values: list[list[int]],
    value_scales: list[float],
    count: int,
    scale: float,
) -> list[float]:
    """With one loop for the scores."""
    if any(isinf(key_scales[at]) or isinf(value_scales[at]) for at in range(count)):
        return [nan for _ in query]
    codes, unit = quantize_query(query)
    best, scores = -inf, []
    for at, each in enumerate(score_sums(codes, stored[:count])):
        scores.append(each * (unit * scale * key_scales[at]))
        best = max(best, scores[-1])
    weights = [exp(score - best) for score in scores]
    weighted = [weight * value_scales[at] for at, weight in enumerate(weights)]
    small, step = weight_codes(weighted)
    factor = step / sum(weights)
    return [factor * each for each in value_sums(small, values[:count])]
