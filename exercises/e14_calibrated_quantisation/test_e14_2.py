"""The public checks of e14.2: importance, scales, an exact fold, and the error of rounding."""

import math
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, number, seeds

Matrix = list[list[float]]
RATIOS = [0.0, 0.25, 0.5, 0.75, 1.0]
INPUTS = [[8.0, 1.0], [-8.0, 0.0]]
WEIGHTS = [[0.6, 3.0]]
CLEAR = 1e-6  # relative: a search whose two best errors are nearer is left out


def whole(matrix: Matrix) -> Matrix:
    """Every weight to the nearest whole number."""
    return [[float(round(each)) for each in row] for row in matrix]


def rows_of_15(matrix: Matrix) -> Matrix:
    """Every row on a symmetric grid of 15 points, up to its largest weight."""
    found = []
    for row in matrix:
        step = max(map(abs, row)) / 7 or 1.0
        found.append([step * round(each / step) for each in row])
    return found


def rounding(inner: Callable[[Matrix], Matrix]) -> Callable[[Matrix], Matrix]:
    """`rounded` as a submission gets it: it accepts plain matrices only."""

    def rounded(matrix: Matrix) -> Matrix:
        matrix = accept(matrix, "The matrix that rounded gets")
        good = isinstance(matrix, list) and all(isinstance(row, list) for row in matrix)
        expect(good, f"rounded takes a list of rows; it got {matrix!r}.")
        return inner(matrix)

    return rounded


def means(inputs: Matrix) -> list[float]:
    """The importance of the channels."""
    return [max(1e-4, sum(abs(x[j]) for x in inputs) / len(inputs)) for j in range(len(inputs[0]))]


def powers(importance: list[float], ratio: float) -> list[float]:
    """The scales."""
    logs = [ratio * math.log(each) for each in importance]
    return [math.exp(each - (max(logs) + min(logs)) / 2) for each in logs]


def error_of(weights: Matrix, inputs: Matrix, scales: list[float], inner: Any) -> float:
    """The squared error of the outputs."""
    matrix = inner([[w * s for w, s in zip(row, scales, strict=True)] for row in weights])
    apart = [
        [new / s - old for new, s, old in zip(line, scales, row, strict=True)]
        for line, row in zip(matrix, weights, strict=True)
    ]
    return sum(
        sum(d * each for d, each in zip(row, x, strict=True)) ** 2 for x in inputs for row in apart
    )


def pair(dice: random.Random, outlier: float = 1.0) -> tuple[Matrix, Matrix]:
    """Weights and inputs; one channel of the inputs is larger."""
    width, out = dice.randint(3, 8), dice.randint(1, 4)
    weights = [[dice.gauss(0, 1) for _ in range(width)] for _ in range(out)]
    large = dice.randrange(width)
    inputs = [
        [dice.gauss(0, 1) * (outlier if j == large else 1.0) for j in range(width)]
        for _ in range(6)
    ]
    return weights, inputs


def same_error(
    impl: Any, weights: Matrix, inputs: Matrix, scales: list[float], inner: Any, what: str
) -> None:
    """The error; what was given is as it was."""
    given = deepcopy(weights), deepcopy(inputs), list(scales)
    got = impl.output_error(*given, rounding(inner))
    equal(given, (weights, inputs, scales), "output_error may not change its arguments")
    case = f"weights {brief(weights)}, inputs {brief(inputs)}, scales {brief([scales])}"
    close(number(got, what, case), error_of(weights, inputs, scales, inner), what, case, rtol=1e-6)


def brief(matrix: Matrix) -> str:
    shown = [f"[{', '.join(f'{each:.3g}' for each in row)}]" for row in matrix[:2]]
    return f"[{', '.join(shown)}{', ...' if len(matrix) > 2 else ''}]"


def same_ratio(impl: Any, weights: Matrix, inputs: Matrix, inner: Any, what: str) -> None:
    """The ratio, if the best one is clearly the best."""
    errors = [error_of(weights, inputs, powers(means(inputs), ratio), inner) for ratio in RATIOS]
    first, second = sorted(errors)[:2]
    if second - first < CLEAR * (first + 1e-9) and errors.count(errors[0]) < len(errors):
        return
    given = deepcopy(weights), deepcopy(inputs)
    got = impl.search(*given, rounding(inner), list(RATIOS))
    equal(given, (weights, inputs), "search may not change its arguments")
    case = f"weights {brief(weights)}, inputs {brief(inputs)}, errors {brief([errors])}"
    equal(number(got, what, case), RATIOS[errors.index(first)], what, case)


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Two channels, one output."""
    close(impl.importance(deepcopy(INPUTS)), [8.0, 0.5], "The importance of the example")
    close(impl.scales([8.0, 0.5], 0.5), [2.0, 0.5], "The scales of the example")
    norm, weights = folded(impl, [1.0, 1.0], WEIGHTS, [2.0, 0.5])
    close(norm, [0.5, 2.0], "The norm of the example")
    close(weights, [[1.2, 1.5]], "The weights of the example")
    same_error(impl, WEIGHTS, INPUTS, [1.0, 1.0], whole, "The error without scales")
    same_error(impl, [[0.6, 3.1]], INPUTS, [2.0, 0.5], whole, "The error with scales")


@check(1, "The importance of channels")
def test_importance(impl: Any) -> None:
    """Both signs, one large token, and channels without any input."""
    cases = (
        [[1.0, -2.0, 0.0]],
        [[3.0, 1.0, 0.0], [-3.0, 1.0, 0.0], [3.0, 1.0, 0.0]],
        [[0.1, 40.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]],
        [[0.00001, 1.0], [0.00001, 2.0]],
    )
    for inputs in cases:
        got = impl.importance(deepcopy(inputs))
        close(got, means(inputs), "The importance of channels", f"inputs {inputs}", atol=1e-9)


@check(2, "The scales")
def test_scales(impl: Any) -> None:
    """Several ratios; the largest and the smallest are inverse to each other."""
    for importance in ([1.0, 4.0, 16.0], [0.5, 0.5], [1e-4, 1.0, 100.0], [3.0]):
        for ratio in RATIOS:
            case = f"importance {importance}, ratio {ratio}"
            given = list(importance)
            got = impl.scales(given, ratio)
            equal(given, importance, "scales may not change the importance", case)
            close(got, powers(importance, ratio), "The scales", case)


def folded(impl: Any, norm: list[float], weights: Matrix, scales: list[float]) -> Any:
    """What `fold` returns, in the right shape; what was given is as it was."""
    given = list(norm), deepcopy(weights), list(scales)
    got = accept(impl.fold(*given), "fold returns the norm and the weights")
    equal(given, (norm, weights, scales), "fold may not change its arguments")
    good = isinstance(got, tuple | list) and len(got) == 2
    expect(good, f"fold returns two things, the norm and the weights; it returned {got}.")
    return got


@check(2, "A fold that changes nothing but rounding")
def test_fold(impl: Any) -> None:
    """Each side alone, and both together: the product of norm and column is what it was."""
    dice = random.Random(1)
    for _ in range(5):
        weights, _ = pair(dice)
        norm = [dice.uniform(0.5, 2) for _ in weights[0]]
        scales = [dice.uniform(0.2, 5) for _ in weights[0]]
        new, larger = folded(impl, norm, weights, scales)
        case = f"norm {brief([norm])}, weights {brief(weights)}, scales {brief([scales])}"
        close(new, [a / b for a, b in zip(norm, scales, strict=True)], "The new norm", case)
        want = [[w * s for w, s in zip(row, scales, strict=True)] for row in weights]
        close(larger, want, "The new weights", case)


@check(2, "The error of the output")
def test_error(impl: Any) -> None:
    """Nothing is lost without rounding; two ways to round; scales of any size."""
    dice = random.Random(2)
    for inner in (lambda matrix: matrix, whole, rows_of_15):
        for outlier in (1.0, 20.0):
            weights, inputs = pair(dice, outlier)
            scales = [dice.uniform(0.3, 3) for _ in weights[0]]
            same_error(impl, weights, inputs, scales, inner, "The error of the outputs")


@check(2, "The best ratio")
def test_search(impl: Any) -> None:
    """With and without a large channel; where nothing is lost the first ratio is the best."""
    dice = random.Random(3)
    for outlier in (1.0, 5.0, 30.0, 100.0):
        for _ in range(3):
            weights, inputs = pair(dice, outlier)
            same_ratio(impl, weights, inputs, rows_of_15, "The best ratio")
    weights = [[1.0, -2.0, 3.0]]
    same_ratio(impl, weights, [[0.0, 0.0, 0.0]], whole, "The best ratio of equal ones")


@check(1, "Twenty random pairs")
def test_random(impl: Any) -> None:
    """Errors and ratios."""
    for seed in seeds(20):
        dice = random.Random(seed)
        weights, inputs = pair(dice, dice.choice((1.0, 10.0, 50.0)))
        same_ratio(impl, weights, inputs, rows_of_15, "The best ratio of a random pair")
