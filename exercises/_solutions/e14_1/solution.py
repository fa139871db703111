"""A rounded weight is no longer free; the others move to where the output error is smallest.

With H = X X^T the error of the output is d H d^T for the changes d of a row. Fix one change and
minimise over the others: they are row i of the inverse of H, scaled so that the fixed change is
what it must be. (Optimal Brain Surgeon, Hassibi and Stork, 1993.) The next weight is chosen
among the columns that are left, so the inverse must be that of H without column i: one step of
elimination gives it. GPTQ gets the same numbers for all steps at once, as the rows of a Cholesky
factor, which is faster and rounds less. Any order of the columns is correct.
"""


def compensate(row: list[float], inverse: list[list[float]], i: int, value: float) -> list[float]:
    """Minus the error over inverse[i][i] times row i of the inverse."""
    error = (row[i] - value) / inverse[i][i]
    new = [weight - error * h for weight, h in zip(row, inverse[i], strict=True)]
    new[i] = value
    return new


def eliminate(inverse: list[list[float]], i: int) -> list[list[float]]:
    """One step of Gaussian elimination."""
    pivot = inverse[i]
    return [
        [0.0 if i in (a, b) else h - row[i] * pivot[b] / pivot[i] for b, h in enumerate(row)]
        for a, row in enumerate(inverse)
    ]


def act_order(inputs: list[list[float]]) -> list[int]:
    """Columns with large inputs first, while all others can still make up for their errors."""
    weight = [sum(x * x for x in column) for column in zip(*inputs, strict=True)]
    return sorted(range(len(weight)), key=lambda i: -weight[i])


def quantize_row(
    row: list[float], inverse: list[list[float]], step: float, order: list[int]
) -> list[int]:
    """Round, compensate and eliminate, column by column."""
    codes = [0] * len(row)
    for i in order:
        codes[i] = min(7, max(-8, round(row[i] / step)))
        row = compensate(row, inverse, i, step * codes[i])
        inverse = eliminate(inverse, i)
    return codes
