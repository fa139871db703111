"""Another way: the distance of float16 numbers from the exponent, codes by their distance."""

import math


def round_up(wanted: float) -> float:
    """Whole distances: 2^-24 at the bottom, else a 1,024th of the power of two below."""
    if wanted == 0:
        return 0.0
    exponent = max(math.frexp(wanted)[1] - 1, -14)
    distance = 2.0 ** (exponent - 10)
    found = math.ceil(wanted / distance) * distance
    return found if found <= 65504 else math.inf


def quantize(row: list[float]) -> tuple[list[int], float]:
    """Round by adding a half."""
    most = 0.0
    for value in row:
        if value != value or abs(value) == math.inf:
            return [0 for _ in row], math.inf
        most = max(most, abs(value))
    scale = round_up(most / 127)
    if scale in (0.0, math.inf):
        return [0 for _ in row], scale
    return [math.floor(value / scale + 0.5) for value in row], scale


def quantize_page(rows: list[list[float]], size: int) -> tuple[list[list[int]], list[float]]:
    """Zeros first, then the rows over them."""
    codes = [[0] * len(rows[0]) for _ in range(size)]
    scales = [0.0] * size
    for slot, row in enumerate(rows):
        codes[slot], scales[slot] = quantize(row)
    return codes, scales


def page_bytes(heads: int, size: int, dim: int) -> int:
    """Codes, then scales."""
    rows = heads * size * 2
    return rows * dim + rows * 2
