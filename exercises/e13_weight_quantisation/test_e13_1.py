"""The public checks of e13.1: packed codes, grids of groups, restored weights, and bytes."""

import random
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, number, seeds

ROW = [-1.0, 0.0, 0.43, 2.0, 10.0, 25.0, 13.0, 12.0]
PACKED = bytes((0x50, 0xF7, 0xF0, 0x23))


def quantized(impl: Any, row: list[float], group: int) -> tuple[bytes, list[float], list[float]]:
    """What `quantize` returns, in the right shape; the row is as it was."""
    given, case = list(row), case_of(row, group)
    got = accept(impl.quantize(given, group), "quantize returns (packed, steps, lows)", case)
    equal(given, row, "quantize may not change the row", case)
    good = isinstance(got, tuple | list) and len(got) == 3
    expect(good, f"quantize returns three things: packed, steps and lows; it returned {got}.")
    packed, steps, lows = got
    expect(type(packed) is bytes, f"The packed codes are bytes; they are {packed!r}: bytes(...).")
    equal(len(packed), len(row) // 2, "The number of packed bytes", case)
    for name, values in (("steps", steps), ("lows", lows)):
        expect(isinstance(values, list | tuple), f"The {name} are a list; they are {values!r}.")
        equal(len(values), len(row) // group, f"The number of {name}, one for each group", case)
        for value in values:
            number(value, f"One of the {name}", case)
    return packed, steps, lows


def restored(impl: Any, packed: bytes, steps: list[float], lows: list[float], group: int) -> Any:
    """What `dequantize` returns, in the right shape."""
    got = impl.dequantize(packed, list(steps), list(lows), group)
    got = accept(got, "dequantize returns a list of weights")
    expect(isinstance(got, list | tuple), f"dequantize returns a list; it returned {got!r}.")
    equal(len(got), len(steps) * group, "The number of restored weights", f"group {group}")
    return got


def case_of(row: list[float], group: int) -> str:
    shown = ", ".join(f"{weight:g}" for weight in row[:8])
    return f"row [{shown}{', ...' if len(row) > 8 else ''}], group {group}"


def codes_of(packed: bytes) -> list[int]:
    """The codes, first one in the low half."""
    return [code for byte in packed for code in (byte & 15, byte >> 4)]


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Eight weights, two groups."""
    packed, steps, lows = quantized(impl, ROW, 4)
    close(steps, [0.2, 1.0], "The steps of the example")
    close(lows, [-1.0, 10.0], "The lows of the example")
    equal(packed.hex(" "), PACKED.hex(" "), "The bytes of the example, in hexadecimal digits")
    want = [-1.0, 0.0, 0.4, 2.0, 10.0, 25.0, 13.0, 12.0]
    close(restored(impl, PACKED, [0.2, 1.0], [-1.0, 10.0], 4), want, "The restored example")
    equal(impl.num_bytes(8, 4), 12, "The bytes of the example's row")


@check(2, "Two codes in a byte")
def test_packing(impl: Any) -> None:
    """Whole numbers from 0 to 15 are their own codes; groups with an odd number of weights."""
    dice = random.Random(1)
    for group, count in ((16, 1), (16, 3), (5, 2), (3, 4), (2, 3)):
        row: list[float] = []
        for _ in range(count):
            inner = [dice.randint(0, 15) for _ in range(group - 2)]
            row += [0.0, *map(float, inner), 15.0]
        packed, _, _ = quantized(impl, row, group)
        equal(codes_of(packed), [int(w) for w in row], "The codes, low half first",
              case_of(row, group))  # fmt: skip


@check(2, "At most half a step of error")
def test_nearest(impl: Any) -> None:
    """The grid of each group covers its weights, and each code is the nearest point."""
    for row, group in examples(random.Random(2), 12):
        packed, steps, lows = quantized(impl, row, group)
        case = case_of(row, group)
        parts = [row[at : at + group] for at in range(0, len(row), group)]
        close(lows, [min(part) for part in parts], "The low of each group", case)
        want = [(max(part) - min(part)) / 15 for part in parts]
        close(steps, want, "The step of each group", case)
        for place, (weight, code) in enumerate(zip(row, codes_of(packed), strict=True)):
            g = place // group
            error = abs(lows[g] + steps[g] * code - weight)
            expect(
                error <= 0.5 * steps[g] * (1 + 1e-9) + 1e-12,
                f"Weight {weight:g} has the code {code}, which stands for "
                f"{lows[g] + steps[g] * code:g}: the error {error:.3g} is more than half a step "
                f"({0.5 * steps[g]:.3g}). ({case})",
                round(error, 9),
            )


@check(1, "One large weight")
def test_outlier(impl: Any) -> None:
    """A large weight makes the step of its own group large, and of no other."""
    row = [0.1 * place for place in range(16)]
    for at in (0, 7, 15):
        changed = [*row[:at], 100.0, *row[at + 1 :]]
        _, steps, _ = quantized(impl, changed, 4)
        want = [max(changed[g : g + 4]) - min(changed[g : g + 4]) for g in range(0, 16, 4)]
        close(steps, [each / 15 for each in want], "The steps with one large weight",
              f"weight {at} is 100")  # fmt: skip


@check(1, "A group of equal weights")
def test_equal_weights(impl: Any) -> None:
    """Zeros, and other equal numbers."""
    for row in ([0.0] * 4, [0.75] * 4, [-3.0] * 4, [0.0, 1.0, 15.0, 2.0, -2.0, -2.0, -2.0, -2.0]):
        packed, steps, lows = quantized(impl, row, 4)
        case = case_of(row, 4)
        close(steps[-1], 0.0, "The step of a group of equal weights", case)
        close(lows[-1], row[-1], "The low of a group of equal weights", case)
        equal(codes_of(packed)[-4:], [0] * 4, "The codes of a group of equal weights", case)


@check(2, "The restored weights")
def test_restore(impl: Any) -> None:
    """Any bytes, with steps and lows that no quantiser made."""
    dice = random.Random(3)
    for group, count in ((4, 1), (4, 3), (16, 2), (3, 4), (2, 5)):
        packed = bytes(dice.randrange(256) for _ in range(group * count // 2))
        steps = [dice.uniform(0.01, 2) for _ in range(count)]
        lows = [dice.uniform(-5, 5) for _ in range(count)]
        want = [
            lows[i // group] + steps[i // group] * code for i, code in enumerate(codes_of(packed))
        ]
        got = restored(impl, packed, steps, lows, group)
        close(got, want, "The restored weights", f"bytes {packed.hex(' ')}, group {group}")


@check(1, "The bytes of a row")
def test_bytes(impl: Any) -> None:
    """Codes, steps and lows."""
    for columns, group in ((128, 128), (128, 32), (4096, 128), (4096, 4096), (576, 64), (30, 3)):
        want = columns // 2 + 4 * (columns // group)
        got = impl.num_bytes(columns, group)
        equal(got, want, "The bytes of a row", f"{columns} weights in groups of {group}")


@check(1, "Twenty random rows, there and back")
def test_random(impl: Any) -> None:
    """What was restored has the same codes again."""
    for seed in seeds(20):
        ((row, group),) = examples(random.Random(seed), 1)
        packed, steps, lows = quantized(impl, row, group)
        got = restored(impl, packed, steps, lows, group)
        want = [lows[i // group] + steps[i // group] * c for i, c in enumerate(codes_of(packed))]
        close(got, want, "The restored weights", case_of(row, group))
        close(got, row, "The weights, restored to half a step", case_of(row, group), rtol=0,
              atol=0.5 * max(steps) + 1e-9)  # fmt: skip


def examples(dice: random.Random, count: int) -> list[tuple[list[float], int]]:
    """Rows of normal numbers, some with an offset or with one large number, and their groups."""
    found = []
    for _ in range(count):
        group = dice.choice((2, 3, 4, 8, 16, 32))
        groups = 2 * dice.randint(1, 3)
        offset = dice.choice((0.0, 0.0, 5.0, -20.0))
        row = [dice.gauss(offset, 1.0) for _ in range(group * groups)]
        if dice.random() < 0.3:
            row[dice.randrange(len(row))] *= 30
        found.append((row, group))
    return found
