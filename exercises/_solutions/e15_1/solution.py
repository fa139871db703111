"""A scale that is rounded up is never too small, so no code passes 127 and none has to be clipped.

Positive float16 numbers are in the order of their bytes, so the next number is the next whole one.
Below 0.00006 the distances are equal, and the nearest scale could be a third too small. NaN in
the largest number is found by asking for each number, because comparisons with NaN are all false.
"""

import math
import struct

LARGEST = 65504.0


def round_up(wanted: float) -> float:
    """The nearest float16 number, or the next one if it is below."""
    if wanted > LARGEST:
        return math.inf
    (bits,) = struct.unpack("<H", struct.pack("<e", wanted))
    nearest = struct.unpack("<e", struct.pack("<H", bits))[0]
    if nearest < wanted:
        bits += 1
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def quantize(row: list[float]) -> tuple[list[int], float]:
    """The stored scale divides."""
    finite = all(math.isfinite(each) for each in row)
    scale = round_up(max(abs(each) for each in row) / 127) if finite else math.inf
    if scale == 0 or scale == math.inf:
        return [0] * len(row), scale
    return [round(each / scale) for each in row], scale


def quantize_page(rows: list[list[float]], size: int) -> tuple[list[list[int]], list[float]]:
    """Row by row; the slots behind are zeros."""
    codes, scales = [], []
    for row in rows:
        found, scale = quantize(row)
        codes.append(found)
        scales.append(scale)
    empty = size - len(rows)
    return codes + [[0] * len(rows[0]) for _ in range(empty)], scales + [0.0] * empty


def page_bytes(heads: int, size: int, dim: int) -> int:
    """A byte for each number, and two bytes for each row, of keys and of values."""
    return 2 * heads * size * (dim + 2)
