"""Both products are sums of whole numbers; scales come in once, after the sum is complete.

The 128 of every stored code adds 128 times the sum of the query codes to each score sum, so it is
subtracted once for the query, not once for each number. The value scales go into the weights
before they are rounded, because positions have different ones and the sum over positions must stay
a sum of codes. The divisor is the sum of the weights as they were.
"""

import math


def quantize_query(query: list[float]) -> tuple[list[int], float]:
    """The largest number has the code 127 or -127."""
    scale = max(abs(each) for each in query) / 127
    return [round(each / scale) if scale else 0 for each in query], scale


def score_sums(query_codes: list[int], stored: list[list[int]]) -> list[int]:
    """(k + 128) q summed, minus 128 times the sum of q."""
    excess = 128 * sum(query_codes)
    return [sum(q * k for q, k in zip(query_codes, row, strict=True)) - excess for row in stored]


def weight_codes(weighted: list[float]) -> tuple[list[int], float]:
    """The largest weight has the code 127."""
    unit = max(weighted) / 127
    return [round(each / unit) if unit else 0 for each in weighted], unit


def value_sums(codes: list[int], values: list[list[int]]) -> list[int]:
    """Column by column."""
    columns = zip(*values, strict=True)
    return [sum(u * v for u, v in zip(codes, column, strict=True)) for column in columns]


def attend(
    query: list[float],
    stored: list[list[int]],
    key_scales: list[float],
    values: list[list[int]],
    value_scales: list[float],
    count: int,
    scale: float,
) -> list[float]:
    """Only the first `count` positions are looked at."""
    keys, scales = key_scales[:count], value_scales[:count]
    if math.inf in keys or math.inf in scales:
        return [math.nan] * len(query)
    codes, query_scale = quantize_query(query)
    sums = score_sums(codes, stored[:count])
    scores = [each * query_scale * key * scale for each, key in zip(sums, keys, strict=True)]
    largest = max(scores)
    weights = [math.exp(score - largest) for score in scores]
    rounded, unit = weight_codes([w * v for w, v in zip(weights, scales, strict=True)])
    total = sum(weights)
    return [unit * each / total for each in value_sums(rounded, values[:count])]
