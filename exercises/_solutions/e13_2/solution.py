"""The levels divide a normal distribution into parts of nearly equal probability.

So each of the 16 codes is used about equally often, if the weights are normal: dense levels near 0,
where most weights are, and wide ones at the ends. One level is exactly 0, so a pruned weight stays
0. The scales of neighbouring blocks are alike, so their differences from the mean are small, and
8 bits are enough for them.
"""

from statistics import NormalDist, fmean


def side(count: int) -> list[float]:
    """The first `count` of count + 1 quantiles from delta down to one half."""
    delta = ((1 - 1 / 30) + (1 - 1 / 32)) / 2
    gap = (delta - 0.5) / count
    return [NormalDist().inv_cdf(delta - gap * place) for place in range(count)]


def levels() -> list[float]:
    """Seven quantiles below 0, then 0, then eight above; over the largest of them."""
    above, below = side(8), side(7)
    found = [-each for each in below] + [0.0] + above[::-1]
    return [each / max(found) for each in found]


def nearest(value: float, table: list[float]) -> int:
    """The number of the level with the smallest distance."""
    return min(range(len(table)), key=lambda code: abs(table[code] - value))


def quantize(weights: list[float], size: int) -> tuple[list[int], list[float]]:
    """The largest absolute weight of each block, and the nearest levels."""
    table = levels()
    codes: list[int] = []
    scales: list[float] = []
    for start in range(0, len(weights), size):
        block = weights[start : start + size]
        scale = max(map(abs, block))
        codes += [nearest(weight / scale, table) if scale else 7 for weight in block]
        scales.append(scale)
    return codes, scales


def dequantize(codes: list[int], scales: list[float], size: int) -> list[float]:
    """The level of each code, times the scale of its block."""
    table = levels()
    return [table[code] * scales[place // size] for place, code in enumerate(codes)]


def compress(scales: list[float], size: int) -> tuple[list[int], list[float], float]:
    """Differences from the mean, in whole steps of each block."""
    mean = fmean(scales)
    codes: list[int] = []
    steps: list[float] = []
    for start in range(0, len(scales), size):
        block = [scale - mean for scale in scales[start : start + size]]
        step = max(map(abs, block)) / 127
        codes += [round(each / step) if step else 0 for each in block]
        steps.append(step)
    return codes, steps, mean


def restore(codes: list[int], steps: list[float], mean: float, size: int) -> list[float]:
    """The mean, and the steps of the block."""
    return [mean + steps[place // size] * code for place, code in enumerate(codes)]


def bits_per_weight(size: int, outer: int | None = None) -> float:
    """A code, and a share of the numbers that blocks of weights and of scales have."""
    if outer is None:
        return 4 + 32 / size
    return 4 + 8 / size + 32 / (size * outer)
