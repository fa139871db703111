"""e14.1: one column step of GPTQ, and a row. The task is in README.md."""


def compensate(row: list[float], inverse: list[list[float]], i: int, value: float) -> list[float]:
    """Return the row after weight `i` became `value`: the other weights make up for the error."""
    raise NotImplementedError(
        "TODO e14.1: the error over inverse[i][i], times row i of the inverse"
    )


def eliminate(inverse: list[list[float]], i: int) -> list[list[float]]:
    """Return the inverse without column `i`, whose row and column become zeros."""
    raise NotImplementedError("TODO e14.1: subtract the product of column i and row i")


def act_order(inputs: list[list[float]]) -> list[int]:
    """Return the columns by their sum of squares over all inputs, largest first."""
    raise NotImplementedError("TODO e14.1: a sum of squares for each column")


def quantize_row(
    row: list[float], inverse: list[list[float]], step: float, order: list[int]
) -> list[int]:
    """Return the 4-bit codes (-8 to 7) of a row, quantised in this order of columns."""
    raise NotImplementedError("TODO e14.1: round, compensate, eliminate, for each column in turn")
