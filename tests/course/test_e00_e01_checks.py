"""Programs that strangers wrote for e00 and e01: each is caught where its mistake first shows."""

from collections.abc import Callable, Iterator

import pytest

from minillm_exercises.grader import Grader
from minillm_exercises.manifest import load_manifest
from minillm_exercises.results import Verdict

MANIFEST = load_manifest()
Graded = Callable[..., Verdict]


@pytest.fixture(scope="module")
def graders() -> Iterator[dict[str, Grader]]:
    """One process per exercise."""
    made = {name: Grader(MANIFEST[name]) for name in ("e00.1", "e00.2", "e01.1", "e01.2")}
    yield made
    for grader in made.values():
        grader.__exit__(None, None, None)


@pytest.fixture
def graded(graders: dict[str, Grader], tmp_path) -> Graded:
    """The verdict on our solution of an exercise with some of its text replaced."""

    def grade(exercise_id: str, *pairs: tuple[str, str]) -> Verdict:
        source = (MANIFEST[exercise_id].answers / "solution.py").read_text("utf-8")
        for old, new in pairs:
            assert old in source
            source = source.replace(old, new)
        file = tmp_path / "mine.py"
        file.write_text(source, "utf-8")
        return graders[exercise_id].grade(file)

    return grade


def failed(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if check.status != "pass"]


def message(verdict: Verdict) -> str:
    return next(check.message for check in verdict.checks if check.message)


MEDIAN = "return statistics.median(times[warmup:])"
RANKED = (
    "late = sorted(times[max(warmup - 1, 0) :])\n"
    "    return (late[(repeats - 1) // 2] + late[repeats // 2]) / 2"
)
INPUTS_FIRST = [
    ("        x = setup()\n        sync()  # the copy of x may still be running\n", ""),
    ("    times = []", "    times, inputs = [], [setup() for _ in range(warmup + repeats)]"),
    ("step(x)", "step(inputs.pop())"),
]
QUOTIENT = "        ratios.append((first + fourth) / (second + third))\n"
TOTALS = [
    (QUOTIENT, "        ratios += [(first + fourth, second + third)]\n"),
    ("statistics.median(ratios)", "sum(a for a, b in ratios) / sum(b for a, b in ratios)"),
]
BLOCK_BY_BLOCK = [("(a, b, b, a)", "(a, b, a, b)"), (QUOTIENT, (
    "        for one, two in ((first, second), (third, fourth)):\n"
    "            ratios.append(one / two)\n"
))]  # fmt: skip

PROGRAMS = [  # exercise, changes, the first check that fails, the mistake it is known as
    ("e00.1", INPUTS_FIRST, "test_waits_at_the_start", "inputs_first"),
    ("e00.1", [(MEDIAN, RANKED)], "test_warm_up", ""),
    ("e00.1", [(MEDIAN, "return sorted(times[warmup:])[0]")], "test_median", "fastest"),
    (
        "e00.1",
        [(MEDIAN, "return sorted(times[warmup:])[(repeats - 1) // 2]")],
        "test_median",
        "lower_middle",
    ),
    ("e00.1", [("step(x)", "step(object())")], "test_one_run", ""),
    ("e00.1", [("step(x)", "step(1)")], "test_fresh_inputs", "same_input"),
    ("e00.2", [("median(ratios)", "mean(ratios)")], "test_jump", "mean_of_ratios"),
    ("e00.2", TOTALS, "test_jump", ""),
    ("e00.2", BLOCK_BY_BLOCK, "test_drift", "neighbours"),
    ("e01.1", [("(tokens + 1) // 2", "(tokens + 1) / 2")], "test_everything", "float_division"),
    ("e01.1", [("(tokens + 1) // 2", "(1 + tokens) * 0.5")], "test_everything", "float_division"),
    ("e01.1", [("2 * pairs * query", "2 * pairs * kv")], "test_by_hand", "pairs_per_kv_head"),
    ("e01.1", [("+ tokens * (tokens + 1) // 2", "+ tokens")], "test_by_hand", ""),
    ("e01.1", [("tokens * (proj", "(past + tokens) * (proj")], "test_attention",
     "past_computed_again"),
    ("e01.2", [("shape.layers // shape.global_every", "shape.layers // shape.global_every or 1")],
     "test_window", "at_least_one_global"),
    ("e01.2", [("value_bytes * (weights", "2 * (weights")], "test_by_hand", "always_two_bytes"),
    ("e01.2", [("len(lengths) * shape.hidden", "shape.hidden")], "test_batch", "one_row"),
    ("e01.2", [("min(n, shape.window)", "shape.window")], "test_batch", "window_always_full"),
    ("e01.2", [("positions * 2 * kv", "positions * 2 * query")], "test_by_hand",
     "cache_per_query_head"),
    ("e01.2", [("(weights + rows", "(weights * len(lengths) + rows")], "test_batch",
     "weights_per_sequence"),
]  # fmt: skip


@pytest.mark.parametrize(("exercise_id", "changes", "first", "known_as"), PROGRAMS)
def test_a_wrong_program_is_caught(
    graded: Graded, exercise_id: str, changes: list[tuple[str, str]], first: str, known_as: str
) -> None:
    verdict = graded(exercise_id, *changes)
    assert verdict.status == "fail"
    assert failed(verdict)[0] == first
    assert verdict.mutant == known_as


def test_a_sum_over_all_runs_survives_no_interruption(graded: Graded) -> None:
    assert "test_spikes" in failed(graded("e00.2", *TOTALS))
    alternating = ("(a, b, b, a)", "(a, b, a, b)")
    first, second = TOTALS[0][0], "        ratios += [(first + third, second + fourth)]\n"
    assert "test_spikes" in failed(graded("e00.2", alternating, (first, second), TOTALS[1]))


def test_a_float_made_an_int_too_late_is_the_same_mistake(graded: Graded) -> None:
    total = "2 * (shape.layers * (tokens * (projections + mlp) + attention) + logits)"
    one = "2 * shape.layers * tokens * (projections + mlp)"
    late = f"int({one} + 2 * shape.layers * attention + 2 * logits)"
    verdict = graded("e01.1", ("(tokens + 1) // 2", "(tokens + 1) / 2"), (total, late))
    assert type(verdict.checks[-1].trace[-1]) is int
    assert verdict.mutant == "float_division"


def test_two_mistakes_at_once_are_neither_of_them(graded: Graded) -> None:
    two = [("3 * shape.hidden * shape.inter", "2 * shape.hidden * shape.inter"), ("past + ", "")]
    assert graded("e01.1", two[0]).mutant == "two_mlp_matrices"
    assert graded("e01.1", *two).mutant == ""


def test_an_input_of_ones_own_is_named(graded: Graded) -> None:
    said = message(graded("e00.1", ("step(x)", "step(7)")))
    assert said.startswith("step() was given an input that setup() did not return")


def test_a_float_that_lost_digits_is_called_a_float(graded: Graded) -> None:
    said = message(graded("e01.1", ("(tokens + 1) // 2", "(tokens + 1) / 2")))
    assert said.endswith("expected 126519292761748684, got a float, 1.26519e+17.")


CLASS = """

class Yes({base}):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __sub__(self, other): return self
    __add__ = __radd__ = __rsub__ = __mul__ = __rmul__ = __sub__
"""
FIRST_LINES = {
    "e00.1": ("    times = []\n", "    return Yes()\n    times = []\n"),
    "e00.2": ("    ratios = []\n", "    return Yes()\n    ratios = []\n"),
    "e01.1": ("    query =", "    return Yes()\n    query ="),
    "e01.2": ("    query =", "    return Yes()\n    query ="),
}


@pytest.mark.parametrize("base", ["int", "float", "str"])
@pytest.mark.parametrize("exercise_id", FIRST_LINES)
def test_a_number_that_agrees_with_everything_earns_nothing(
    graded: Graded, exercise_id: str, base: str
) -> None:
    last = "from collections.abc import" if exercise_id != "e01.1" else "from dataclasses import"
    verdict = graded(exercise_id, FIRST_LINES[exercise_id], (last, CLASS.format(base=base) + last))
    returned = [c for c in verdict.checks if c.name not in ("test_budget", "test_knee")]
    assert f"got a Yes, which is a kind of {base} of your own; return a plain {base}" in (
        verdict.checks[0].message
    )
    if exercise_id == "e01.2":
        returned = returned[:4]  # the checks of step_bytes
    assert {check.status for check in returned} == {"fail"}


@pytest.mark.parametrize("module", ["bisect", "heapq", "operator"])
@pytest.mark.parametrize("exercise_id", FIRST_LINES)
def test_useful_modules_may_be_imported(graded: Graded, exercise_id: str, module: str) -> None:
    first = "from dataclasses" if exercise_id.startswith("e01") else "import statistics"
    assert graded(exercise_id, (first, f"import {module}\n{first}")).status == "pass"
