"""e14.2: the scales of AWQ for one normalisation and one matrix. The task is in README.md."""

from collections.abc import Callable

Matrix = list[list[float]]


def importance(inputs: Matrix) -> list[float]:
    """Return the mean |x| of each channel, at least 0.0001."""
    raise NotImplementedError("TODO e14.2: a mean for each channel")


def scales(importance: list[float], ratio: float) -> list[float]:
    """Return the powers of the importance, divided by the root of largest times smallest."""
    raise NotImplementedError("TODO e14.2: powers, then around 1")


def fold(norm: list[float], weights: Matrix, scales: list[float]) -> tuple[list[float], Matrix]:
    """Return the norm divided by the scales, and the weights multiplied by them."""
    raise NotImplementedError("TODO e14.2: divide the norm, multiply the columns")


def output_error(
    weights: Matrix, inputs: Matrix, scales: list[float], rounded: Callable[[Matrix], Matrix]
) -> float:
    """Return the squared error of all outputs when the scaled weights are rounded."""
    raise NotImplementedError("TODO e14.2: the exact output against the rounded one")


def search(
    weights: Matrix, inputs: Matrix, rounded: Callable[[Matrix], Matrix], ratios: list[float]
) -> float:
    """Return the ratio with the smallest output error."""
    raise NotImplementedError("TODO e14.2: try all ratios")
