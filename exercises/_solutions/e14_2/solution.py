"""Multiply before rounding, divide afterwards: the rounding error of the channel is divided too.

The step of a group is set by its largest weight. As long as a scaled channel is not the largest of
its group, the step stays the same, and the error in the output is smaller by the factor s.
If s is too large, the scaled channel sets the step, and all other channels of the group get worse.
So there is a best ratio between 0 (nothing is scaled) and 1, and a search over a grid finds it. No
weight is kept in 16 bits, and at run time there is nothing more to do, because the division is in
the weights of the normalisation.
"""

import math
from collections.abc import Callable

Matrix = list[list[float]]


def importance(inputs: Matrix) -> list[float]:
    """The mean |x| of each channel."""
    columns = zip(*inputs, strict=True)
    return [max(1e-4, sum(map(abs, column)) / len(inputs)) for column in columns]


def scales(importance: list[float], ratio: float) -> list[float]:
    """Powers, so that the largest and the smallest are inverse to each other."""
    powers = [each**ratio for each in importance]
    middle = math.sqrt(max(powers) * min(powers))
    return [power / middle for power in powers]


def fold(norm: list[float], weights: Matrix, scales: list[float]) -> tuple[list[float], Matrix]:
    """Divide what comes out of the norm, multiply what it meets."""
    smaller = [each / scale for each, scale in zip(norm, scales, strict=True)]
    larger = [[w * scale for w, scale in zip(row, scales, strict=True)] for row in weights]
    return smaller, larger


def output_error(
    weights: Matrix, inputs: Matrix, scales: list[float], rounded: Callable[[Matrix], Matrix]
) -> float:
    """The exact output against that of the rounded pair."""
    _, larger = fold(scales, weights, scales)
    matrix = rounded(larger)
    total = 0.0
    for x in inputs:
        divided = [each / scale for each, scale in zip(x, scales, strict=True)]
        for exact, row in zip(weights, matrix, strict=True):
            total += (dot(exact, x) - dot(row, divided)) ** 2
    return total


def search(
    weights: Matrix, inputs: Matrix, rounded: Callable[[Matrix], Matrix], ratios: list[float]
) -> float:
    """The first of the best."""
    found = importance(inputs)
    return min(ratios, key=lambda r: output_error(weights, inputs, scales(found, r), rounded))


def dot(a: list[float], b: list[float]) -> float:
    """The inner product."""
    return sum(x * y for x, y in zip(a, b, strict=True))
