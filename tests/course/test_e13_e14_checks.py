"""e13 and e14: programs that strangers wrote, right and wrong ones, and what the checks say."""

from typing import Any

import pytest
from submissions import Graded, failed, said

EXERCISES = ("e13.1", "e13.2", "e14.1", "e14.2")  # for the fixture `graded`

# Every word in capitals is a place where people go wrong.
GROUPS = """
def grid(part):
    return min(part), (max(part) - min(part)) / STEPS

def quantize(row, group):
    grids = [grid(row[i:i + group]) for i in range(0, len(row), group)]
    value = 0
    for i in range(len(row)):
        low, step = grids[GROUP]
        code = NEAREST if step > 0 else 0
        value += code * 16 ** PLACE
    packed = PACKED
    return packed, [step for _, step in grids], [low for low, _ in grids]

def dequantize(packed, steps, lows, group):
    value = int.from_bytes(packed, "little")
    found = []
    for i in range(2 * len(packed)):
        found.append(steps[i // group] * (value % 16) + lows[i // group])
        value //= 16
    return found

def num_bytes(columns, group):
    return columns * 4 // 8 + columns // group * 2 * NUMBERS
"""
GROUPS_RIGHT = {
    "STEPS": "15",
    "GROUP": "i // group",
    "NEAREST": "int((row[i] - low) / step + 0.5)",
    "PLACE": "i",
    "PACKED": 'value.to_bytes(len(row) // 2, "little")',
    "NUMBERS": "2",
}

PAIR = """
def importance(inputs):
    width = len(inputs[0])
    return [max(1e-4, MEAN) for j in range(width)]

def scales(importance, ratio):
    p = [i ** ratio for i in importance]
    return [x / (max(p) * min(p)) ** ROOT for x in p]

def fold(norm, weights, scales):
    new = []
    for row in weights:
        new.append([row[j] * scales[j] for j in range(len(row))])
    return [n / s for n, s in zip(norm, scales)], new

def output_error(weights, inputs, scales, rounded):
    matrix = rounded(fold(scales, ROUNDED, scales)[1])
    error = 0
    for x in inputs:
        for o in range(len(weights)):
            want = sum(weights[o][j] * x[j] for j in range(len(x)))
            got = sum(matrix[o][j] * INPUT for j in range(len(x)))
            error += (want - got) ** 2
    return error

def search(weights, inputs, rounded, ratios):
    errors = [output_error(weights, inputs, scales(importance(inputs), r), rounded) for r in ratios]
    return ratios[errors.index(BEST(errors))]
"""
PAIR_RIGHT = {
    "MEAN": "sum(abs(x[j]) for x in inputs) / len(inputs)",
    "ROOT": "0.5",
    "ROUNDED": "weights",
    "INPUT": "x[j] / scales[j]",
    "BEST": "min",
}


def written(template: str, right: dict[str, str], changes: Any) -> str:
    for name, text in (right | changes).items():
        template = template.replace(name, text)
    return template


def test_one_large_integer_is_a_way_to_pack(graded: Graded) -> None:
    assert graded("e13.1", source=written(GROUPS, GROUPS_RIGHT, {})).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"NEAREST": "int((row[i] - low) / step)"}, "truncates"),
        ({"PLACE": "(i ^ 1)"}, "high_half_first"),
        ({"NUMBERS": "1"}, "counts_no_lows"),
        ({"STEPS": "16", "NEAREST": "min(15, round((row[i] - low) / step))"}, "sixteen_steps"),
    ],
)
def test_a_row_in_other_words_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e13.1", source=written(GROUPS, GROUPS_RIGHT, changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def test_codes_that_are_not_packed_are_said(graded: Graded) -> None:
    listed = {"PACKED": "[value % 16]"}
    verdict = graded("e13.1", source=written(GROUPS, GROUPS_RIGHT, listed))
    assert "The packed codes are bytes" in said(verdict)


def test_the_grid_of_a_neighbour_is_more_than_half_a_step_away(graded: Graded) -> None:
    shifted = {"GROUP": "(i + 1) // group % len(grids)", "NEAREST": "0"}
    verdict = graded("e13.1", source=written(GROUPS, GROUPS_RIGHT, shifted))
    assert {"test_packing", "test_nearest"} <= set(failed(verdict))


TABLE = """
def levels():
    return [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0,
            0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
"""


def test_a_table_from_a_library_is_as_good_as_quantiles(graded: Graded) -> None:
    own = "".join(open_solution("e13.2").partition("def quantize")[1:])
    nearest = "def nearest(v, table):\n    return min(range(16), key=lambda c: abs(table[c] - v))\n"
    source = "from statistics import fmean\n" + TABLE + nearest + own
    assert graded("e13.2", source=source).status == "pass"


def test_scales_above_zero_use_half_of_the_codes(graded: Graded) -> None:
    source = open_solution("e13.2").replace("[scale - mean for", "[scale for")
    assert "test_compress" in failed(graded("e13.2", source=source))


def test_rounding_half_up_is_right(graded: Graded) -> None:
    rounded = ("round(row[i] / step)", "int(row[i] / step + 99.5) - 99")
    half_up = open_solution("e14.1").replace(*rounded)
    assert graded("e14.1", source=half_up).status == "pass"


def test_compensation_after_the_last_step_alone_is_not_enough(graded: Graded) -> None:
    source = open_solution("e14.1").replace("        inverse = eliminate(inverse, i)\n", "")
    assert graded("e14.1", source=source).mutant == "never_eliminates"


def test_a_pair_in_other_words_is_right(graded: Graded) -> None:
    assert graded("e14.2", source=written(PAIR, PAIR_RIGHT, {})).status == "pass"


@pytest.mark.parametrize(
    ("changes", "mutant"),
    [
        ({"MEAN": "max(abs(x[j]) for x in inputs)"}, "largest_input"),
        ({"INPUT": "x[j]"}, "inputs_not_divided"),
        ({"BEST": "max"}, "worst_ratio"),
        ({"ROOT": "0"}, "not_around_one"),
    ],
)
def test_a_pair_with_a_mistake_is_named(graded: Graded, changes: Any, mutant: str) -> None:
    verdict = graded("e14.2", source=written(PAIR, PAIR_RIGHT, changes))
    assert verdict.status == "fail"
    assert verdict.mutant == mutant


def open_solution(exercise: str) -> str:
    """Our solution."""
    from minillm_exercises.manifest import load_manifest

    return (load_manifest()[exercise].answers / "solution.py").read_text("utf-8")
