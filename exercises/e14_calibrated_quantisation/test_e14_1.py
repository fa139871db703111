"""The public checks of e14.1: single steps against an independent solution, then whole rows."""

import random
from copy import deepcopy
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, seeds

Matrix = list[list[float]]
ROW, INVERSE = [1.4, 0.4], [[2.0, -1.0], [-1.0, 2.0]]
FAR = 1e-6  # a random row in which a weight comes nearer to the middle of two codes is left out


def solve(matrix: Matrix) -> Matrix:
    """The inverse of a matrix, by Gauss and Jordan with pivots."""
    size = len(matrix)
    rows = [[*row, *(float(a == b) for b in range(size))] for a, row in enumerate(matrix)]
    for at in range(size):
        best = max(range(at, size), key=lambda a: abs(rows[a][at]))
        rows[at], rows[best] = rows[best], rows[at]
        rows[at] = [each / rows[at][at] for each in rows[at]]
        for a in range(size):
            if a != at:
                factor = rows[a][at]
                rows[a] = [x - factor * y for x, y in zip(rows[a], rows[at], strict=True)]
    return [row[size:] for row in rows]


def hessian(inputs: Matrix) -> Matrix:
    """The sum of x x^T, and a hundredth of its mean diagonal so that it can be inverted."""
    size = len(inputs[0])
    found = [[sum(x[a] * x[b] for x in inputs) for b in range(size)] for a in range(size)]
    damp = 0.01 * sum(found[a][a] for a in range(size)) / size
    for a in range(size):
        found[a][a] += damp
    return found


def correlated(dice: random.Random, size: int, count: int | None = None) -> Matrix:
    """Inputs whose columns have something in common."""
    mix = [[dice.gauss(0, 1) for _ in range(size)] for _ in range(size)]
    found = []
    for _ in range(count or 3 * size):
        common = dice.gauss(0, 2)
        free = [dice.gauss(0, 1) + common for _ in range(size)]
        found.append([sum(m * f for m, f in zip(row, free, strict=True)) for row in mix])
    return found


def part(matrix: Matrix, kept: list[int]) -> Matrix:
    return [[matrix[a][b] for b in kept] for a in kept]


def moved(row: list[float], h: Matrix, fixed: dict[int, float]) -> list[float]:
    """The best row with these values fixed: the others solve a linear system of their own."""
    free = [j for j in range(len(row)) if j not in fixed]
    found = list(row)
    for i, value in fixed.items():
        found[i] = value
    if free:
        pull = [-sum(h[a][i] * (value - row[i]) for i, value in fixed.items()) for a in free]
        inverse = solve(part(h, free))
        for a, line in zip(free, inverse, strict=True):
            found[a] = row[a] + sum(x * y for x, y in zip(line, pull, strict=True))
    return found


def codes_of(row: list[float], h: Matrix, step: float, order: list[int]) -> tuple[list[int], float]:
    """The codes, each column from a new linear system, and how near one came to a border."""
    fixed: dict[int, float] = {}
    codes, near = [0] * len(row), 1.0
    for i in order:
        quotient = moved(row, h, fixed)[i] / step
        codes[i] = min(7, max(-8, round(quotient)))
        if -9 < quotient < 8:
            near = min(near, abs(abs(quotient - round(quotient)) - 0.5))
        fixed[i] = step * codes[i]
    return codes, near


def shown(values: Any) -> str:
    return "[" + ", ".join(f"{each:.3g}" for each in values) + "]"


def same_codes(
    impl: Any, row: list[float], h: Matrix, step: float, order: list[int], what: str
) -> None:
    """Codes of a row; what was given is as it was. A row at a border is left out."""
    want, near = codes_of(row, h, step, order)
    if near < FAR:
        return
    inverse = solve(h)
    given = list(row), deepcopy(inverse), step, list(order)
    case = f"row {shown(row)}, step {step:g}, order {order}"
    got = accept(impl.quantize_row(*given), "quantize_row returns codes", case)
    equal(given, (row, inverse, step, order), "quantize_row may not change its arguments", case)
    expect(isinstance(got, list | tuple), f"quantize_row returns a list of codes, not {got!r}.")
    equal(list(got), want, what, case)


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Two columns."""
    close(impl.compensate(list(ROW), deepcopy(INVERSE), 0, 1.0), [1.0, 0.6],
          "The row after column 0 became 1")  # fmt: skip
    want = [[0.0, 0.0], [0.0, 1.5]]
    close(impl.eliminate(deepcopy(INVERSE), 0), want, "The inverse without column 0")
    h = [[2 / 3, 1 / 3], [1 / 3, 2 / 3]]
    same_codes(impl, ROW, h, 1.0, [0, 1], "The codes of the example")


@check(2, "One step is the best one")
def test_compensate(impl: Any) -> None:
    """Any column, any value; compared with the solution of a linear system."""
    dice = random.Random(1)
    for size in (1, 2, 3, 5):
        for i in range(size):
            h = hessian(correlated(dice, size))
            row, value = [dice.gauss(0, 1) for _ in range(size)], dice.gauss(0, 1)
            inverse = solve(h)
            given = list(row), deepcopy(inverse)
            case = f"row {shown(row)}, column {i} becomes {value:.3g}"
            got = accept(impl.compensate(*given, i, value), "compensate returns a row", case)
            equal(given, (row, inverse), "compensate may not change its arguments", case)
            want = moved(row, h, {i: value})
            close(got, want, "The row after a step", case, rtol=1e-6)


@check(2, "The inverse without a column")
def test_eliminate(impl: Any) -> None:
    """Compared with the inverse of the smaller matrix; two columns one after the other."""
    dice = random.Random(2)
    for size in (2, 3, 5):
        h = hessian(correlated(dice, size))
        inverse, left = solve(h), list(range(size))
        for i in dice.sample(range(size), 2):
            before = deepcopy(inverse)
            case = f"{size} columns, column {i} goes"
            found = accept(impl.eliminate(inverse, i), "eliminate returns a matrix", case)
            equal(inverse, before, "eliminate may not change its argument", case)
            left.remove(i)
            want = [[0.0] * size for _ in range(size)]
            small = solve(part(h, left)) if left else []
            for a, line in zip(left, small, strict=True):
                for b, value in zip(left, line, strict=True):
                    want[a][b] = value
            close(found, want, "The inverse without a column", case, rtol=1e-6, atol=1e-9)
            equal([float(each) for each in found[i]], [0.0] * size, "The row of the column", case)
            inverse = want


@check(1, "The order of the columns")
def test_order(impl: Any) -> None:
    """Large inputs first, of both signs; equal ones in order."""
    cases = (
        [[1.0, 3.0, 2.0]],
        [[5.0, 1.0, 0.0], [-5.0, 1.0, 0.0], [0.0, 1.0, 2.0]],
        [[1.0, 1.0, 1.0, 2.0]],
        [[0.1, 10.0], [2.0, -0.1]],
    )
    for inputs in cases:
        sums = [sum(x[j] ** 2 for x in inputs) for j in range(len(inputs[0]))]
        want = sorted(range(len(sums)), key=lambda j: (-sums[j], j))
        got = accept(impl.act_order(deepcopy(inputs)), "act_order returns columns")
        equal(list(got), want, "The order of the columns", f"inputs {inputs}")


@check(1, "Independent columns")
def test_independent(impl: Any) -> None:
    """Where H is diagonal nothing can be made up for, so every weight is rounded to nearest."""
    dice = random.Random(3)
    for size in (1, 3, 6):
        h = [[(1.0 + a) * (a == b) for b in range(size)] for a in range(size)]
        row = [dice.uniform(-0.7, 0.7) for _ in range(size)]
        order = dice.sample(range(size), size)
        same_codes(impl, row, h, 0.1, order, "The codes of independent columns")


@check(1, "Codes at their limits")
def test_limits(impl: Any) -> None:
    """A weight beyond the grid has a large error, which the others make up for."""
    dice = random.Random(4)
    for first in (-1.5, 1.2, 0.95):
        h = hessian(correlated(dice, 4))
        row = [first, 0.3, -0.2, 0.1]
        same_codes(impl, row, h, 0.1, [0, 1, 2, 3], "The codes of a row with a large weight")


@check(2, "Whole rows in several orders")
def test_rows(impl: Any) -> None:
    """From the first to the last column, backwards, and by importance."""
    dice = random.Random(5)
    for size in (2, 3, 4, 8):
        for _ in range(3):
            inputs = correlated(dice, size)
            h = hessian(inputs)
            row = [dice.gauss(0, 0.3) for _ in range(size)]
            forth = list(range(size))
            for order in (forth, forth[::-1], dice.sample(forth, size)):
                same_codes(impl, row, h, 0.1, order, "The codes of a row")


@check(1, "Twenty random rows")
def test_random(impl: Any) -> None:
    """Other sizes and steps."""
    for seed in seeds(20):
        dice = random.Random(seed)
        size = dice.randint(2, 7)
        h = hessian(correlated(dice, size))
        row = [dice.gauss(0, 0.5) for _ in range(size)]
        order = dice.sample(range(size), size)
        same_codes(impl, row, h, dice.uniform(0.05, 0.3), order, "The codes of a random row")
