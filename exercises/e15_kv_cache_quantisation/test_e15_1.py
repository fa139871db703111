"""The public checks of e15.1: scales, codes, rows that are not usual, pages and bytes."""

import math
import random
import struct
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, number, seeds

NUMBERS = [struct.unpack("<e", struct.pack("<H", bits))[0] for bits in range(0x7C00)]  # ascending


def up(wanted: float) -> float:
    """The smallest float16 number that is large enough, by looking through all of them."""
    low, high = 0, len(NUMBERS)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if NUMBERS[middle] >= wanted else (middle + 1, high)
    return NUMBERS[low] if low < len(NUMBERS) else math.inf


def quantized(impl: Any, row: list[float]) -> tuple[list[int], float]:
    """What `quantize` returns, in the right shape; the row is as it was."""
    given, case = list(row), f"quantize({row})"
    got = accept(impl.quantize(given), "quantize returns (codes, scale)", case)
    good = isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[0], list | tuple)
    expect(good, f"quantize returns two things: a list of codes, and a scale; it returned {got}.")
    same = len(given) == len(row) and all(map(alike, given, row))
    expect(same, f"quantize may not change the row. ({case})", same)
    codes, scale = got
    equal(len(codes), len(row), "The number of codes", case)
    for code in codes:
        whole = type(code) is int
        expect(whole, f"A code is a whole number (int); one is {code!r}. ({case})", repr(code))
    return list(codes), number(scale, "The scale", case)


def alike(first: Any, second: Any) -> bool:
    """Equal, or both no number."""
    return first == second or (first != first and second != second)


def check_row(row: list[float], codes: list[int], scale: float, case: str) -> None:
    """The scale is large enough, and each code is the nearest one."""
    equal(scale, up(max(map(abs, row)) / 127), "The scale", case)
    for value, code in zip(row, codes, strict=True):
        inside = -127 <= code <= 127
        expect(inside, f"The code {code} of {value:g} is not from -127 to 127. ({case})", code)
        error = abs(scale * code - value)
        expect(
            error <= 0.5 * scale * (1 + 1e-9),
            f"{value:g} has the code {code}, which stands for {scale * code:g} with the scale "
            f"{scale:g}: the error {error:.3g} is more than half of the scale. ({case})",
            (code, round(scale, 12)),
        )


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Scales, rows and bytes."""
    equal(float(number(impl.round_up(1.0), "round_up(1)")), 1.0, "round_up(1)")
    found = number(impl.round_up(1 / 127), "round_up(1 / 127)")
    equal(found, up(1 / 127), "round_up(1 / 127)")
    row = [254.0, -127.0, 3.0, 0.0]
    check_row(row, *quantized(impl, row), "quantize([254, -127, 3, 0])")
    equal(impl.page_bytes(3, 16, 64), 6336, "page_bytes(3, 16, 64)")


@check(2, "The smallest float16 number that is large enough")
def test_round_up(impl: Any) -> None:
    """Float16 numbers, numbers just above and below them, and what is too large."""
    draw = random.Random(1)
    some = [0.0, NUMBERS[1], NUMBERS[0x400], NUMBERS[-1]]
    some += [NUMBERS[draw.randrange(1, 0x7C00)] for _ in range(20)]
    some += [NUMBERS[draw.randrange(1, 0x400)] for _ in range(10)]  # equal distances
    for each in some:
        for factor in (1.0, 1.0001, 0.9999):
            wanted = each * factor
            got = number(impl.round_up(wanted), "round_up", f"round_up({wanted!r})")
            equal(float(got), up(wanted), "The smallest float16 number that is not below",
                  f"round_up({wanted!r})")  # fmt: skip
    for wanted in (65504.1, 1e6):
        got = number(impl.round_up(wanted), "round_up", f"round_up({wanted})")
        equal(got, math.inf, "round_up of what no float16 number reaches", f"round_up({wanted})")


@check(2, "Nearest codes, none above 127")
def test_codes(impl: Any) -> None:
    """Rows of usual size, very small rows, and rows with one large number."""
    draw = random.Random(2)
    for size in (1.0, 40.0, 1e-3, 2e-6, 3e-7):
        for _ in range(4):
            row = [draw.gauss(0, size) for _ in range(8)]
            check_row(row, *quantized(impl, row), f"a row of numbers of size {size:g}: {row}")
    row = [100.0, *(0.3 * place for place in range(7))]
    check_row(row, *quantized(impl, row), f"one large number: {row}")


@check(1, "Divide by the scale that is stored")
def test_stored_scale(impl: Any) -> None:
    """Numbers that are exact multiples of the stored scale come back exactly."""
    draw = random.Random(3)
    for most in (127.0, 1.0, 0.37, 3e-6):
        scale = up(most / 127)
        codes = [draw.randint(-100, 100) for _ in range(6)]
        row = [most, *(scale * code for code in codes)]
        found, stored = quantized(impl, row)
        case = f"largest number {most:g}, the others multiples of the scale {scale:g}"
        equal(stored, scale, "The scale", case)
        equal(found[1:], codes, "The codes", case)


@check(1, "A row of zeros")
def test_zeros(impl: Any) -> None:
    """It has no scale to divide by."""
    for row in ([0.0, 0.0, 0.0], [0.0, -0.0]):
        codes, scale = quantized(impl, row)
        equal(codes, [0] * len(row), "The codes of a row of zeros", f"quantize({row})")
        equal(scale, 0.0, "The scale of a row of zeros", f"quantize({row})")


@check(2, "NaN and infinity are not hidden")
def test_not_finite(impl: Any) -> None:
    """In any place of a row, and what is too large for a 16-bit scale."""
    for bad in (math.nan, math.inf, -math.inf, 1e8):
        for place in range(3):
            row = [1.0, -2.0, 0.5]
            row[place] = bad
            codes, scale = quantized(impl, row)
            equal(scale, math.inf, "The scale of a row with NaN or infinity, or too large a number",
                  f"quantize({row})")  # fmt: skip
            equal(codes, [0, 0, 0], "The codes of such a row", f"quantize({row})")


def page_of(impl: Any, rows: list[list[float]], size: int) -> tuple[list[Any], list[Any]]:
    """What `quantize_page` returns, in the right shape."""
    case = f"quantize_page(rows, {size}) with rows {rows}"[:300]
    given = [list(row) for row in rows]
    got = accept(impl.quantize_page(given, size), "quantize_page returns (codes, scales)", case)
    good = isinstance(got, tuple | list) and len(got) == 2
    expect(good, f"quantize_page returns two things: codes and scales; it returned {got!r:.200}.")
    codes, scales = got
    equal(len(codes), size, "The number of slots with codes", case)
    equal(len(scales), size, "The number of scales", case)
    kept = all(all(map(alike, a, b)) for a, b in zip(given, rows, strict=True))
    expect(kept, "quantize_page may not change the rows.", kept)
    return list(codes), list(scales)


@check(2, "A scale for each row of a page")
def test_page(impl: Any) -> None:
    """Rows of very different size, a row with NaN between others, and empty slots."""
    rows = [[100.0, -30.0], [0.01, 0.004], [0.0, 0.0], [math.nan, 1.0], [-3.0, 2.0]]
    codes, scales = page_of(impl, rows, 8)
    for at in (0, 1, 4):
        check_row(rows[at], codes[at], scales[at], f"row {at} of the page {rows}")
    for at, scale in ((2, 0.0), (3, math.inf)):
        equal(scales[at], scale, f"The scale of row {at}", f"the page {rows}")
        equal(list(codes[at]), [0, 0], f"The codes of row {at}", f"the page {rows}")
    for at in (5, 6, 7):
        equal(list(codes[at]), [0, 0], f"The codes of the empty slot {at}", "5 rows, 8 slots")
        equal(scales[at], 0.0, f"The scale of the empty slot {at}", "5 rows, 8 slots")


@check(1, "The bytes of a page")
def test_bytes(impl: Any) -> None:
    """Codes and scales of keys and values."""
    for heads, size, dim in ((1, 16, 128), (8, 16, 128), (2, 4, 64), (3, 256, 80), (1, 1, 1)):
        want = 2 * heads * size * dim + 2 * heads * size * 2
        case = f"{heads} heads, {size} slots, {dim} numbers"
        equal(impl.page_bytes(heads, size, dim), want, "The bytes of a page", case)


@check(1, "Twenty random pages")
def test_random(impl: Any) -> None:
    """Each row of another size."""
    for seed in seeds(20):
        draw = random.Random(seed)
        dim, size = draw.choice((2, 5, 8)), draw.choice((4, 8))
        sizes = [10 ** draw.uniform(-7, 3) for _ in range(draw.randint(1, size))]
        rows = [[draw.gauss(0, each) for _ in range(dim)] for each in sizes]
        codes, scales = page_of(impl, rows, size)
        for at, row in enumerate(rows):
            check_row(row, codes[at], scales[at], f"row {at} of a random page: {row}")
