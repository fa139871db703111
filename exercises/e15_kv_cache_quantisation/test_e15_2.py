"""The public checks of e15.2: codes, exact sums, and the output of a tile."""

import math
import random
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, number, seeds

Tile = tuple[list[float], list[list[int]], list[float], list[list[int]], list[float], int, float]


def codes_of(values: list[float]) -> tuple[list[int], float]:
    """Nearest codes with one step for all numbers, the largest of which is 127 steps."""
    step = max(map(abs, values)) / 127
    return [round(each / step) if step else 0 for each in values], step


def expected(tile: Tile) -> list[float]:
    """The recipe of the README, from the codes of the keys without the 128."""
    query, stored, key_scales, values, value_scales, count, scale = tile
    codes, unit = codes_of(query)
    scores = [
        sum(q * (k - 128) for q, k in zip(codes, row, strict=True)) * unit * key * scale
        for row, key in zip(stored[:count], key_scales, strict=False)
    ]
    weights = [math.exp(score - max(scores)) for score in scores]
    weighted = [w * v for w, v in zip(weights, value_scales, strict=False)]
    rounded, step = codes_of(weighted)
    sums = [
        sum(u * v for u, v in zip(rounded, column, strict=True))
        for column in zip(*values[:count], strict=True)
    ]
    return [step * each / sum(weights) for each in sums]


def is_near_a_half(values: list[float]) -> bool:
    """Whether some number is about equally near to two codes, of which both are right."""
    step = max(map(abs, values)) / 127
    return step > 0 and any(abs(abs(x / step) % 1 - 0.5) < 1e-6 for x in values)


def tile_of(draw: random.Random, dim: int, size: int, count: int, far: float = 1.0) -> Tile:
    """A random tile; scores are `far` apart. The slots behind have garbage, and NaN as scales."""
    while True:
        query = [draw.gauss(0, 1) for _ in range(dim)]
        stored = [[draw.randint(1, 255) for _ in range(dim)] for _ in range(size)]
        values = [[draw.randint(-127, 127) for _ in range(dim)] for _ in range(size)]
        keys = [draw.uniform(0.005, 0.02) * far for _ in range(count)]
        scales = [draw.uniform(0.001, 0.05) for _ in range(count)]
        behind = [math.nan] * (size - count)
        tile = query, stored, keys + behind, values, scales + behind, count, dim**-0.5
        if not is_near_a_half(query) and not is_near_a_half(weighted_of(tile)):
            return tile


def weighted_of(tile: Tile) -> list[float]:
    """What is rounded in step 3."""
    query, stored, key_scales, _, value_scales, count, scale = tile
    codes, unit = codes_of(query)
    scores = [
        sum(q * (k - 128) for q, k in zip(codes, row, strict=True)) * unit * key * scale
        for row, key in zip(stored[:count], key_scales, strict=False)
    ]
    return [math.exp(s - max(scores)) * v for s, v in zip(scores, value_scales, strict=False)]


def attended(impl: Any, tile: Tile) -> list[Any]:
    """What `attend` returns, in the right shape; the lists are as they were."""
    query, stored, key_scales, values, value_scales, count, scale = tile
    copies = [list(row) for row in stored], [list(row) for row in values]
    given = list(query), copies[0], list(key_scales), copies[1], list(value_scales)
    got = accept(impl.attend(*given, count, scale), "attend returns a list of numbers")
    expect(isinstance(got, list | tuple), f"attend returns a list; it returned {got!r:.200}.")
    equal(len(got), len(query), "The number of output numbers", case_of(tile))
    equal(given[0], query, "attend may not change the query")
    equal(copies, (stored, values), "attend may not change keys and values")
    return list(got)


def case_of(tile: Tile) -> str:
    query, stored, *_, count, _ = tile
    return f"a query of {len(query)} numbers, {len(stored)} slots of which {count} are visible"


def whole(got: Any, want: list[int], what: str, case: str) -> None:
    """A list of these whole numbers."""
    got = accept(got, what, case)
    expect(isinstance(got, list | tuple), f"{what}: expected a list; got {got!r:.200}. ({case})")
    kinds = {type(each).__name__ for each in got}
    expect(kinds <= {"int"}, f"{what} are whole numbers (int), not {', '.join(sorted(kinds))}: "
           "nothing is rounded before the sum is complete.", sorted(kinds))  # fmt: skip
    equal(list(got), want, what, case)


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """A query, sums of two keys, weights, and sums of values."""
    codes, scale = accept(impl.quantize_query([2.0, -1.0]), "quantize_query([2, -1])")
    close(scale, 2 / 127, "The scale of the query [2, -1]")
    equal(codes[0], 127, "The code of 2")
    expect(codes[1] in (-64, -63), f"The code of -1 is -64 or -63; it is {codes[1]!r}.", codes[1])
    stored = [[129, 255], [133, 126]]
    whole(impl.score_sums([127, -64], stored), [-8001, 763], "The score sums", "the example")
    rounded, unit = accept(impl.weight_codes([1.0, 0.5, 0.001]), "weight_codes([1, 0.5, 0.001])")
    close(unit, 1 / 127, "The unit of the weights")
    expect(list(rounded) in ([127, 64, 0], [127, 63, 0]),
           f"The codes of 1, 0.5 and 0.001 are 127, 64 or 63, and 0; they are {rounded}.",
           list(rounded))  # fmt: skip
    rows = [[1, -127], [10, 2], [99, 99]]
    whole(impl.value_sums([127, 64, 0], rows), [767, -16001], "The value sums", "the example")


@check(2, "The sums of scores")
def test_scores(impl: Any) -> None:
    """Exact for the largest codes, for one position, and without the 128."""
    for dim in (1, 64, 256):
        case = f"{dim} query codes of -127, key codes of 127, -127 and 0"
        stored = [[255] * dim, [1] * dim, [128] * dim]
        want = [-127 * 127 * dim, 127 * 127 * dim, 0]
        whole(impl.score_sums([-127] * dim, stored), want, "The score sums", case)
    draw = random.Random(1)
    for dim in (2, 5, 16):
        codes = [draw.randint(-127, 127) for _ in range(dim)]
        stored = [[draw.randint(1, 255) for _ in range(dim)] for _ in range(4)]
        want = [sum(q * (k - 128) for q, k in zip(codes, row, strict=True)) for row in stored]
        case = f"query codes {codes}, stored {stored}"
        whole(impl.score_sums(list(codes), stored), want, "The score sums", case)


@check(2, "The sums of values")
def test_values(impl: Any) -> None:
    """Over positions, for each number of a head."""
    for size in (1, 64, 300):
        rows = [[127, -127, 0]] * size
        want = [127 * 127 * size, -127 * 127 * size, 0]
        whole(impl.value_sums([127] * size, rows), want, "The value sums",
              f"{size} positions with the largest codes")  # fmt: skip
    draw = random.Random(2)
    for dim, size in ((1, 4), (5, 3), (3, 8)):
        codes = [draw.randint(0, 127) for _ in range(size)]
        rows = [[draw.randint(-127, 127) for _ in range(dim)] for _ in range(size)]
        want = [sum(u * v for u, v in zip(codes, each, strict=True)) for each in zip(*rows,
                strict=True)]  # fmt: skip
        case = f"weight codes {codes}, values {rows}"
        whole(impl.value_sums(list(codes), rows), want, "The value sums", case)


@check(1, "Codes of queries and weights")
def test_codes(impl: Any) -> None:
    """The nearest codes; the largest number has 127."""
    draw = random.Random(3)
    for name in ("quantize_query", "weight_codes"):
        for size in (1.0, 1e-4, 30.0):
            values = [draw.gauss(0, size) for _ in range(7)]
            if name == "weight_codes":
                values = [abs(each) for each in values]
            if is_near_a_half(values):
                continue
            want, step = codes_of(values)
            case = f"{name}({values})"
            got = accept(getattr(impl, name)(list(values)), f"{name} returns (codes, scale)", case)
            codes, found = got
            close(found, step, "The scale or unit", case, rtol=1e-12, atol=0)
            equal(list(codes), want, "The codes", case)


@check(1, "Zeros")
def test_zeros(impl: Any) -> None:
    """A query, weights, and values without a scale."""
    for name in ("quantize_query", "weight_codes"):
        codes, step = accept(getattr(impl, name)([0.0, 0.0]), f"{name} returns (codes, scale)")
        equal(list(codes), [0, 0], "The codes of zeros", f"{name}([0, 0])")
        equal(step, 0.0, "The scale or unit of zeros", f"{name}([0, 0])")
    tile = [1.0, 2.0], [[1, 9], [7, 200]], [0.01, 0.02], [[0, 0], [0, 0]], [0.0, 0.0], 2, 1.0
    close(attended(impl, tile), [0.0, 0.0], "The output over values of zeros", case_of(tile))
    tile = [0.0, 0.0], [[1, 9], [7, 200]], [0.01, 0.02], [[127, 0], [0, 127]], [1.0, 1.0], 2, 1.0
    close(attended(impl, tile), [63.5, 63.5], "The output of a query of zeros: the mean",
          case_of(tile))  # fmt: skip


@check(2, "The output of a tile")
def test_attend(impl: Any) -> None:
    """All slots visible; each position with its own scales."""
    draw = random.Random(4)
    for dim, size in ((2, 1), (2, 3), (8, 4), (16, 16)):
        tile = tile_of(draw, dim, size, size)
        close(attended(impl, tile), expected(tile), "The output", case_of(tile), 1e-9, 1e-12)


@check(2, "Slots behind the last position")
def test_behind(impl: Any) -> None:
    """Their codes are garbage and their scales NaN."""
    draw = random.Random(5)
    for dim, size, count in ((2, 4, 1), (4, 8, 3), (8, 16, 15)):
        tile = tile_of(draw, dim, size, count)
        close(attended(impl, tile), expected(tile), "The output", case_of(tile), 1e-9, 1e-12)


@check(1, "Scores that are far apart or very large")
def test_far(impl: Any) -> None:
    """exp of such a score would overflow; its difference from the largest does not."""
    draw = random.Random(6)
    for far in (30.0, 1000.0, 30000.0):
        tile = tile_of(draw, 8, 6, 5, far)
        case = f"{case_of(tile)}; scores up to about {far:g}"
        close(attended(impl, tile), expected(tile), "The output", case, 1e-9, 1e-12)


@check(1, "An infinite scale")
def test_infinite(impl: Any) -> None:
    """One visible row that was broken makes the output NaN; one behind does not."""
    draw = random.Random(7)
    for place in (2, 4):  # of the key scales and the value scales in a tile
        for at in range(3):
            tile = list(tile_of(draw, 4, 4, 3))
            tile[place][at] = math.inf
            broken: Tile = tuple(tile)  # type: ignore[assignment]
            got = [number(x, "An output number", case_of(broken)) for x in attended(impl, broken)]
            what = "key" if place == 2 else "value"
            expect(all(x != x for x in got), f"The {what} scale of visible position {at} is "
                   f"infinite, so all output numbers are NaN; they are {got}.",
                   [x == x for x in got])  # fmt: skip
    tile = list(tile_of(draw, 4, 4, 3))
    tile[2][3] = tile[4][3] = math.inf
    behind: Tile = tuple(tile)  # type: ignore[assignment]
    close(attended(impl, behind), expected(behind), "The output with an infinite scale behind",
          case_of(behind), 1e-9, 1e-12)  # fmt: skip


@check(1, "Twenty random tiles")
def test_random(impl: Any) -> None:
    """Any number of visible positions."""
    for seed in seeds(20):
        draw = random.Random(seed)
        size = draw.choice((4, 8, 12))
        tile = tile_of(draw, draw.choice((2, 4, 6)), size, draw.randint(1, size))
        close(attended(impl, tile), expected(tile), "The output", case_of(tile), 1e-9, 1e-12)
