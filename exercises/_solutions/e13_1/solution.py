"""The grid of a group starts at its lowest weight and ends at its highest: 16 points, 15 steps.

So no code has to be clamped, and the nearest point is at most half a step away. A group of equal
weights has no step, and its code 0 stands for all of them. Codes are packed for the whole row: a
group with an odd number of weights shares a byte with the next one, and no byte is half empty.
"""


def quantize(row: list[float], group: int) -> tuple[bytes, list[float], list[float]]:
    """The packed codes of a row, and the step and the lowest weight of each group."""
    codes: list[int] = []
    steps: list[float] = []
    lows: list[float] = []
    for start in range(0, len(row), group):
        part = row[start : start + group]
        low = min(part)
        step = (max(part) - low) / 15
        codes += [round((weight - low) / step) if step else 0 for weight in part]
        steps.append(step)
        lows.append(low)
    packed = bytes(a | b << 4 for a, b in zip(codes[::2], codes[1::2], strict=True))
    return packed, steps, lows


def dequantize(packed: bytes, steps: list[float], lows: list[float], group: int) -> list[float]:
    """low + step * code, with the step and the low of the weight's group."""
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    return [lows[i // group] + steps[i // group] * code for i, code in enumerate(codes)]


def num_bytes(columns: int, group: int) -> int:
    """Half a byte for each code, and four bytes for each group."""
    return columns // 2 + 4 * (columns // group)
