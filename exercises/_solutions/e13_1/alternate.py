"""Another way: weight by weight, the nearest of the 16 points by comparison, bytes in an array."""


def quantize(row: list[float], group: int) -> tuple[bytes, list[float], list[float]]:
    """Search the grid of each group instead of dividing by its step."""
    count = len(row) // group
    packed = bytearray(len(row) // 2)
    steps, lows = [0.0] * count, [0.0] * count
    for g in range(count):
        ordered = sorted(row[g * group : (g + 1) * group])
        lows[g], steps[g] = ordered[0], (ordered[-1] - ordered[0]) / 15
    for place, weight in enumerate(row):
        g = place // group
        code = min(range(16), key=lambda c: abs(lows[g] + c * steps[g] - weight))
        packed[place // 2] += code * 16 ** (place % 2)
    return bytes(packed), steps, lows


def dequantize(packed: bytes, steps: list[float], lows: list[float], group: int) -> list[float]:
    """Group by group."""
    found = []
    for g, (step, low) in enumerate(zip(steps, lows, strict=True)):
        for place in range(g * group, (g + 1) * group):
            code = packed[place // 2] // 16 ** (place % 2) % 16
            found.append(code * step + low)
    return found


def num_bytes(columns: int, group: int) -> int:
    """In bits, then in bytes."""
    bits = 4 * columns + (16 + 16) * (columns // group)
    return bits // 8
