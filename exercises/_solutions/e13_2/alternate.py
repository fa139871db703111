"""Another way: the nearest level by bisection among the midpoints, and everything in one pass."""

from bisect import bisect
from fractions import Fraction
from itertools import pairwise
from statistics import NormalDist


def levels() -> list[float]:
    """Probabilities from below: 1 - delta to one half and on to delta."""
    delta = float((1 - Fraction(1, 30) + 1 - Fraction(1, 32)) / 2)
    dist = NormalDist()
    found = [dist.inv_cdf((1 - delta) + (delta - 0.5) * place / 7) for place in range(7)]
    found.append(0.0)
    found += [dist.inv_cdf(0.5 + (delta - 0.5) * place / 8) for place in range(1, 9)]
    return [each / found[-1] for each in found]


def quantize(weights: list[float], size: int) -> tuple[list[int], list[float]]:
    """Count the midpoints below each quotient."""
    table = levels()
    middles = [(a + b) / 2 for a, b in pairwise(table)]
    scales = [0.0] * -(-len(weights) // size)
    for place, weight in enumerate(weights):
        scales[place // size] = max(scales[place // size], abs(weight))
    codes = []
    for place, weight in enumerate(weights):
        scale = scales[place // size]
        codes.append(bisect(middles, weight / scale if scale > 0 else 0.0))
    return codes, scales


def dequantize(codes: list[int], scales: list[float], size: int) -> list[float]:
    """Every scale is repeated."""
    long = [scale for scale in scales for _ in range(size)][: len(codes)]
    table = levels()
    return [table[code] * scale for code, scale in zip(codes, long, strict=True)]


def compress(scales: list[float], size: int) -> tuple[list[int], list[float], float]:
    """Steps first, codes afterwards."""
    mean = sum(scales) / len(scales)
    apart = [scale - mean for scale in scales]
    starts = range(0, len(apart), size)
    steps = [max(max(part), -min(part)) / 127 for part in (apart[s : s + size] for s in starts)]
    codes = []
    for place, each in enumerate(apart):
        step = steps[place // size]
        codes.append(round(each / step) if step > 0 else 0)
    return codes, steps, mean


def restore(codes: list[int], steps: list[float], mean: float, size: int) -> list[float]:
    """Code by code."""
    found = []
    for place in range(len(codes)):
        found.append(codes[place] * steps[place // size] + mean)
    return found


def bits_per_weight(size: int, outer: int | None = None) -> float:
    """Bits of one outer block over its weights."""
    if outer is None:
        return (4 * size + 32) / size
    weights = size * outer
    return (4 * weights + 8 * outer + 32) / weights
