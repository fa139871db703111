"""e13.2: NF4 with double quantisation. The task is in README.md."""


def levels() -> list[float]:
    """Return the 16 levels of NF4, from -1 to 1."""
    raise NotImplementedError("TODO e13.2: 7 quantiles below 0, then 0, then 8 quantiles above")


def quantize(weights: list[float], size: int) -> tuple[list[int], list[float]]:
    """Return the codes of the weights, and the scale of each block of `size`."""
    raise NotImplementedError("TODO e13.2: the largest absolute weight, the nearest level")


def dequantize(codes: list[int], scales: list[float], size: int) -> list[float]:
    """Return the weights that the codes stand for."""
    raise NotImplementedError("TODO e13.2: level * scale of the block")


def compress(scales: list[float], size: int) -> tuple[list[int], list[float], float]:
    """Return 8-bit codes of the scales, the step of each block of `size`, and the mean."""
    raise NotImplementedError("TODO e13.2: subtract the mean, then codes from -127 to 127")


def restore(codes: list[int], steps: list[float], mean: float, size: int) -> list[float]:
    """Return the scales that the codes stand for."""
    raise NotImplementedError("TODO e13.2: mean + step * code")


def bits_per_weight(size: int, outer: int | None = None) -> float:
    """Return the bits of a weight, with its share of the scales of blocks of `size`; with `outer`
    the scales are compressed in blocks of `outer`."""
    raise NotImplementedError("TODO e13.2: 4 bits and a share of the scales")
