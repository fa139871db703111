"""e15.1: keys of a page in 8 bits, with a scale for each token. The task is in README.md."""


def round_up(wanted: float) -> float:
    """Return the smallest float16 number that is at least `wanted`, which is 0 or more; infinity
    above 65504."""
    raise NotImplementedError("TODO e15.1: the nearest float16 number, or the next one")


def quantize(row: list[float]) -> tuple[list[int], float]:
    """Return the codes, from -127 to 127, and the scale of a row."""
    raise NotImplementedError("TODO e15.1: scale from the largest number, then the nearest codes")


def quantize_page(rows: list[list[float]], size: int) -> tuple[list[list[int]], list[float]]:
    """Return codes and scales of `size` slots; there is a row for each of the first ones."""
    raise NotImplementedError("TODO e15.1: a scale for each row, zeros behind")


def page_bytes(heads: int, size: int, dim: int) -> int:
    """Return the bytes of the keys and values of a page: codes, and scales of 2 bytes."""
    raise NotImplementedError("TODO e15.1: codes and scales of keys and values")
