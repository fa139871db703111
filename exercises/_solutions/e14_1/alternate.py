"""Another way: changes collected from the Cholesky factor of the inverse, as GPTQ does it.

The two functions that the task names work in place on copies. `quantize_row` reorders the inverse,
factors it once, and takes the coefficients of all steps from the rows of the factor.
"""

import math
from copy import deepcopy


def compensate(row: list[float], inverse: list[list[float]], i: int, value: float) -> list[float]:
    """The share of every weight in the error of one."""
    found = list(row)
    for j in range(len(row)):
        found[j] += (value - row[i]) * inverse[j][i] / inverse[i][i]
    found[i] = value
    return found


def eliminate(inverse: list[list[float]], i: int) -> list[list[float]]:
    """Entry by entry in a copy."""
    found, size = deepcopy(inverse), len(inverse)
    for a in range(size):
        for b in range(size):
            found[a][b] -= inverse[a][i] * inverse[i][b] / inverse[i][i]
    for a in range(size):
        found[a][i] = found[i][a] = 0.0
    return found


def act_order(inputs: list[list[float]]) -> list[int]:
    """A sum for each column, then a stable sort of the negative sums."""
    sums = [0.0] * len(inputs[0])
    for x in inputs:
        for i, each in enumerate(x):
            sums[i] += each**2
    return [i for _, i in sorted((-total, i) for i, total in enumerate(sums))]


def quantize_row(
    row: list[float], inverse: list[list[float]], step: float, order: list[int]
) -> list[int]:
    """Rows of the upper factor U, where the inverse is the product of its transpose and U."""
    left = [row[i] for i in order]
    factor = upper([[inverse[a][b] for b in order] for a in order])
    codes = [0] * len(row)
    for place, i in enumerate(order):
        codes[i] = max(-8, min(7, round(left[place] / step)))
        error = (left[place] - step * codes[i]) / factor[place][place]
        for later in range(place, len(row)):
            left[later] -= error * factor[place][later]
    return codes


def upper(matrix: list[list[float]]) -> list[list[float]]:
    """The upper Cholesky factor."""
    size = len(matrix)
    u = [[0.0] * size for _ in range(size)]
    for a in range(size):
        for b in range(a, size):
            rest = matrix[a][b] - sum(u[k][a] * u[k][b] for k in range(a))
            u[a][b] = math.sqrt(rest) if a == b else rest / u[a][a]
    return u
