"""e13.1: a row of weights in groups of 4-bit codes. The task is in README.md."""


def quantize(row: list[float], group: int) -> tuple[bytes, list[float], list[float]]:
    """Return the packed codes of a row, and the step and the lowest weight of each group.

    `group` divides the length of the row, which is even.
    """
    raise NotImplementedError("TODO e13.1: a step and a low for each group, two codes in a byte")


def dequantize(packed: bytes, steps: list[float], lows: list[float], group: int) -> list[float]:
    """Return the weights that the codes stand for: low + step * code."""
    raise NotImplementedError("TODO e13.1: unpack the codes, low + step * code")


def num_bytes(columns: int, group: int) -> int:
    """Return the bytes of a row of that many weights; a step and a low take 16 bits each."""
    raise NotImplementedError("TODO e13.1: codes, steps and lows")
