"""The checks of e11.1. Every input lies in a larger buffer of NaN, and so does every output."""

import math
from types import ModuleType

import torch

from minillm_exercises.checking import check, expect, seeds, tensor
from minillm_exercises.triton_checks import (
    DEVICE,
    Guarded,
    Seen,
    bytes_read,
    bytes_written,
    compiles,
    filled,
    guarded,
    output,
    watching,
)

INF = math.inf


def wanted(x: torch.Tensor, lengths: list[int], temperature: float) -> torch.Tensor:
    """The result in float64, row by row."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for row, length in enumerate(lengths):
        logits = x[row, :length].double() / temperature
        if length and logits.max() > -INF:
            result[row, :length] = logits.softmax(0)
    return result.float()


def poisoned(x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """`x` with NaN behind the length of each row."""
    x = x.clone()
    for row, length in enumerate(lengths):
        x[row, length:] = math.nan
    return x


def run(
    impl: ModuleType,
    x: torch.Tensor,
    lengths: list[int],
    temperature: float,
    case: str,
    gaps: tuple[int, int] = (0, 0),
    rtol: float = 1e-5,
) -> Seen:
    """Call the submission with these numbers, and look at the result and around it."""
    rows, columns = x.shape
    given = guarded(poisoned(x, lengths), (columns + gaps[0], 1))
    counted = guarded(torch.tensor(lengths, dtype=torch.int32))
    out: Guarded = output(rows, columns, strides=(columns + gaps[1], 1))
    with watching(impl, x=given.view, out=out.view) as seen:
        impl.softmax(given.view, counted.view, temperature, out.view)
    seen.ran("softmax")
    filled(out, wanted(x, lengths, temperature), "softmax", case, rtol)
    given.unharmed("x", case)
    counted.unharmed("lengths", case)
    return seen


@check(points=1, task="the example of the README")
def test_by_hand(impl):
    x = torch.tensor([[1.0, 3.0, 2.0, 5.0], [4.0, 4.0, 4.0, 4.0], [7.0, 1.0, 1.0, 1.0]])
    run(impl, x, [3, 4, 0], 1.0, "x = [[1, 3, 2, *], [4, 4, 4, 4], [*, *, *, *]]")


@check(points=2, task="rows of any width")
def test_widths(impl):
    draws = list(seeds(7))
    for seed, columns in zip(draws, (1, 2, 3, 16, 33, 300, 4096), strict=True):
        x = tensor(seed, 3, columns)
        run(impl, x, [columns] * 3, 1.0, f"3 rows of {columns}, all of them count")


@check(points=2, task="what is behind a row's length is not read, and its share is 0")
def test_lengths(impl):
    for seed in seeds(2):
        x = tensor(seed, 6, 11)
        run(impl, x, [11, 1, 10, 5, 8, 2], 1.0, "6 rows of 11, lengths 11, 1, 10, 5, 8 and 2")


@check(points=1, task="the temperature divides the logits")
def test_temperature(impl):
    (seed,) = seeds(1)
    for temperature in (0.5, 2.0, 0.05):
        x = tensor(seed, 2, 9)
        run(impl, x, [9, 4], temperature, f"2 rows of 9, temperature {temperature:g}")


@check(points=1, task="large numbers of either sign")
def test_large(impl):
    (seed,) = seeds(1)
    for shift, temperature in ((1000.0, 1.0), (-1000.0, 1.0), (500.0, 0.5), (500.0, 2.0)):
        x = tensor(seed, 2, 7) + shift
        case = f"2 rows of 7 around {shift:g}, temperature {temperature:g}"
        run(impl, x, [7, 5], temperature, case, rtol=1e-4)


@check(points=2, task="minus infinity, and rows in which nothing counts")
def test_infinite(impl):
    x = torch.tensor([[1.0, -INF, 2.0, -INF, 0.5], [-INF, -INF, -INF, -INF, 3.0]])
    run(impl, x, [5, 5], 1.0, "x = [[1, -inf, 2, -inf, 0.5], [-inf, -inf, -inf, -inf, 3]]")
    run(impl, x, [2, 4], 1.0, "the same with lengths 2 and 4: the second row has no share to give")
    run(impl, x, [0, 5], 1.0, "the same with lengths 0 and 5")


@check(points=2, task="rows that do not lie side by side")
def test_strides(impl):
    (seed,) = seeds(1)
    x = tensor(seed, 3, 6)
    run(impl, x, [6, 6, 6], 1.0, "3 rows of 6, each 9 behind the last", gaps=(3, 3))
    run(impl, x, [6, 2, 5], 1.0, "3 rows of 6: 6 apart in x, 11 apart in out", gaps=(0, 5))
    run(impl, x, [6, 2, 5], 1.0, "3 rows of 6: 10 apart in x, 6 apart in out", gaps=(4, 0))


@check(points=1, task="bfloat16 is computed in float32")
def test_bfloat16(impl):
    (seed,) = seeds(1)
    x = (tensor(seed, 3, 20) * 4).bfloat16()
    run(impl, x, [20, 13, 1], 0.7, "3 rows of 20 in bfloat16")


@check(points=2, task="one launch, a program per row at most, and each number moves once")
def test_traffic(impl):
    (seed,) = seeds(1)
    lengths = [37, 5, 0, 20]
    case = "4 rows of 37, each 40 behind the last, lengths 37, 5, 0 and 20"
    seen = run(impl, tensor(seed, 4, 37), lengths, 1.0, case, gaps=(3, 0))
    count = len(seen.launches)
    expect(count == 1, f"softmax ({case}): {count} launches, and one is enough.", observed=count)
    programs = seen.launches[0].programs
    expect(
        programs <= 4,
        f"softmax ({case}): {programs} programs for 4 rows; take one for each row at most.",
        observed=programs,
    )
    copied = seen.host.copied
    expect(
        copied == 0,
        f"softmax ({case}): {copied} bytes were copied beside the kernel; that is traffic, too.",
        observed=copied,
    )
    read = "each of the 62 numbers that count is loaded once"
    bytes_read(seen, "x", 4 * sum(lengths), read, case)
    bytes_written(seen, "out", 4 * 4 * 37, "each of the 148 places is stored once", case)


@check(points=1, task="Triton's compiler takes the kernel")
def test_compiles(impl):
    def call(submission):
        x = torch.zeros(3, 20, dtype=torch.bfloat16, device=DEVICE)
        lengths = torch.ones(3, dtype=torch.int32, device=DEVICE)
        for given in (x, x.float()):
            submission.softmax(given, lengths, 0.7, torch.empty(3, 20, device=DEVICE))

    compiles(impl, call, 2, "softmax, twice")
