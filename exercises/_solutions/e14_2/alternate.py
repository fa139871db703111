"""Another way: logarithms for the scales, and the error of the product matrix for the output.

The rounded matrix with its columns divided again is the matrix that is really used; its difference
from the original one, applied to the inputs as they are, is the error.
"""

from collections.abc import Callable
from math import exp, log

Matrix = list[list[float]]


def importance(inputs: Matrix) -> list[float]:
    """Channel by channel."""
    found = []
    for channel in range(len(inputs[0])):
        total = 0.0
        for x in inputs:
            total += abs(x[channel])
        found.append(total / len(inputs) if total > 1e-4 * len(inputs) else 1e-4)
    return found


def scales(importance: list[float], ratio: float) -> list[float]:
    """The logarithms lie around their middle."""
    logs = [ratio * log(each) for each in importance]
    middle = (max(logs) + min(logs)) / 2
    return [exp(each - middle) for each in logs]


def fold(norm: list[float], weights: Matrix, scales: list[float]) -> tuple[list[float], Matrix]:
    """By index."""
    width = range(len(scales))
    return [norm[j] / scales[j] for j in width], [[row[j] * scales[j] for j in width]
                                                  for row in weights]  # fmt: skip


def output_error(
    weights: Matrix, inputs: Matrix, scales: list[float], rounded: Callable[[Matrix], Matrix]
) -> float:
    """The difference of two matrices, applied to every input."""
    width = range(len(scales))
    matrix = rounded([[row[j] * scales[j] for j in width] for row in weights])
    apart = [
        [new[j] / scales[j] - old[j] for j in width]
        for new, old in zip(matrix, weights, strict=True)
    ]
    return sum(sum(row[j] * x[j] for j in width) ** 2 for x in inputs for row in apart)


def search(
    weights: Matrix, inputs: Matrix, rounded: Callable[[Matrix], Matrix], ratios: list[float]
) -> float:
    """Remember the best so far."""
    best, least = ratios[0], float("inf")
    for ratio in ratios:
        error = output_error(weights, inputs, scales(importance(inputs), ratio), rounded)
        if error < least:
            best, least = ratio, error
    return best
