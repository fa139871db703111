"""`verify` on sound toys, and on toys that rotted in every way it promises to find."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from conftest import ToyRoot
from minillm_exercises.checking import seeds
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise
from minillm_exercises.mutation import mechanical_mutants
from minillm_exercises.verify import (
    Problem,
    changed_lines,
    returning_agreeable,
    returning_none,
    verify,
)

CHECKS = "e90_windows/test_e90_1.py"
STARTER = "e90_windows/e90_1.py"
SOLUTION = "_solutions/e90_1/solution.py"
ALTERNATE = "_solutions/e90_1/alternate.py"
MUTANTS = "_solutions/e90_1/mutants.toml"
ZERO = "+        self.largest: int = 0\n"  # the mistake of starts_at_zero


def add_mutant(root: ToyRoot, name: str, teaches: str, *change: str) -> None:
    lines = "\n".join(line.rstrip("\n") for line in change)
    text = (root.root / MUTANTS).read_text("utf-8")
    more = f"\n[{name}]\nteaches = '{teaches}'\nchange = '''\n{lines}\n'''\n"
    root.write(MUTANTS, text + more)


def messages(root: ToyRoot) -> list[str]:
    """What verify says of e90.1."""
    return [problem.message for problem in verify(root.manifest, ["e90.1"])]


def test_sound_exercises_have_no_problem(toys: dict[str, Exercise]) -> None:
    lines: list[str] = []
    assert verify(toys, progress=lines.append) == []
    assert len(lines) == 2
    assert lines[0].startswith("e90.1: ")
    assert lines[0].endswith(" mechanical mutants noticed, 0 to repair")


def test_an_unknown_id_is_an_error(toys: dict[str, Exercise]) -> None:
    with pytest.raises(ExerciseError, match=r"Did you mean 'e90\.1'"):
        verify(toys, ["e90.2"])


def asserts_nothing(root: ToyRoot) -> None:
    root.edit(CHECKS, "    equal(impl", "    (lambda *a: a)(impl")


def no_checks(root: ToyRoot) -> None:
    root.write(CHECKS, "")


def mutant_passes(root: ToyRoot) -> None:
    add_mutant(
        root,
        "harmless",
        "You are harmless.",
        "-        return self.largest",
        "+        return +self.largest",
    )


def mutant_fails_everything(root: ToyRoot) -> None:
    line = "    return [{}sum(numbers[start : start + size]) for start in starts]\n"
    more = "@@\n-        return self.largest\n+        return self.largest + 1\n"
    more += f"@@\n-{line.format('')}+{line.format('1 + ')}"
    root.edit(MUTANTS, ZERO, ZERO + more)


def mutant_far_away(root: ToyRoot) -> None:
    root.edit(MUTANTS, ZERO, ZERO + "".join(f"+        {i} - {i}\n" for i in range(6)))


def mutant_crashes(root: ToyRoot) -> None:
    root.edit(MUTANTS, ZERO, ZERO + "@@\n+        exit()\n         return self.largest\n")


def mutant_is_refused(root: ToyRoot) -> None:
    root.edit(MUTANTS, ZERO, ZERO + "@@\n+        import os\n         return self.largest\n")


def same_message(root: ToyRoot) -> None:
    root.edit(
        MUTANTS,
        "The largest so far begins at 0, so negative numbers never show.",
        "The last window is lost: there are len - size + 1 starts.",
    )


def same_behaviour(root: ToyRoot) -> None:
    add_mutant(root, "copy", "Another.", "-        self.largest: int | None = None", ZERO)


def no_sentence(root: ToyRoot) -> None:
    root.edit(MUTANTS, "The largest so far begins at 0, so negative numbers never show.", "")


def change_of_what_is_not_there(root: ToyRoot) -> None:
    root.edit(SOLUTION, "self.largest: int | None = None", "self.largest: None | int = None")


def change_that_is_no_python(root: ToyRoot) -> None:
    root.edit(MUTANTS, ZERO, "+        self.largest: int = (\n")


def two_mutants(root: ToyRoot) -> None:
    text = (root.root / MUTANTS).read_text("utf-8")
    root.write(MUTANTS, text.split("[window_too_long]")[0])


def alternate_fails_a_check(root: ToyRoot) -> None:
    root.edit(ALTERNATE, "return sums", "return tuple(sums)")
    root.edit(
        CHECKS,
        "    equal(impl.window",
        "    assert isinstance(impl.window_sums([1], 1), list)\n    equal(impl.window",
    )


def alternate_imports_too_much(root: ToyRoot) -> None:
    root.edit(ALTERNATE, "\n\n\ndef window", "\n\nimport itertools\n\n\ndef window")


def no_alternate(root: ToyRoot) -> None:
    (root.root / ALTERNATE).unlink()


def solution_is_wrong(root: ToyRoot) -> None:
    root.edit(SOLUTION, "- size + 1", "- size + 1 - (size == 2)")


def solution_depends_on_the_seed(root: ToyRoot) -> None:
    public = next(seeds(1))
    root.edit(CHECKS, "want = [", f"want = [0] if {public} not in seeds(1) else [")


def starter_gives_the_answer(root: ToyRoot) -> None:
    root.edit(STARTER, 'raise NotImplementedError("TODO e90.1: the largest so far")', "return None")


def starter_without_todo(root: ToyRoot) -> None:
    root.edit(STARTER, "TODO e90.1: the largest", "the largest")


def starter_of_another_exercise(root: ToyRoot) -> None:
    root.edit(STARTER, "TODO e90.1: the largest", "TODO e90.2: the largest")


def starter_untyped(root: ToyRoot) -> None:
    root.edit(STARTER, "number: int) -> int", "number)")


def starter_undocumented(root: ToyRoot) -> None:
    root.edit(STARTER, '    """Sum every `size` neighbours."""\n', "")


def starter_passes(root: ToyRoot) -> None:
    root.write(
        CHECKS,
        (root.root / CHECKS).read_text("utf-8")
        + "\n@check(points=1, task='nothing')\ndef test_nothing(impl):\n    equal(1, 1, 'one')\n",
    )


def none_passes(root: ToyRoot) -> None:
    root.write(
        CHECKS,
        (root.root / CHECKS).read_text("utf-8")
        + "\n@check(points=1, task='input')\ndef test_input(impl):\n    mine = [1]\n"
        "    impl.window_sums(mine, 1)\n    equal(mine, [1], 'your input')\n",
    )


def agreeable_passes(root: ToyRoot) -> None:
    root.write(
        CHECKS,
        (root.root / CHECKS).read_text("utf-8").replace("import check,", "import check, expect,")
        + "\n@check(points=1, task='sum')\ndef test_sum(impl):\n"
        "    expect(impl.window_sums([1, 2], 1) == [1, 2], 'not equal')\n",
    )


def agreeable_set(root: ToyRoot) -> None:
    root.write(
        CHECKS,
        (root.root / CHECKS).read_text("utf-8").replace("import check,", "import check, expect,")
        + "\n@check(points=1, task='sum')\ndef test_sum(impl):\n"
        "    first = {impl.window_sums([1, n], 1)[0] for n in (1, 2)}\n"
        "    expect(len(first) == 1, 'they differ')\n",
    )


def mechanical_survive(root: ToyRoot) -> None:
    root.edit(SOLUTION, "    starts = ", "    size = size * 7 // 7 + 0 - 0 + 5 * 0\n    starts = ")


def survivor_is_stale(root: ToyRoot) -> None:
    line = '\n[{}.survivors]\n"line 99: + -> -" = "no case reaches it"\n\n'
    root.edit("exercises.toml", '\n["e91.1"]', line.format('"e90.1"') + '["e91.1"]')


def no_readme(root: ToyRoot) -> None:
    (root.root / "e90_windows/README.md").unlink()


ROT = [
    (asserts_nothing, "This check compared nothing, so it cannot pass"),
    (no_checks, "test_e90_1.py has no check, and grading nothing may not pass: write"),
    (
        mutant_passes,
        "mutant harmless passes every check: add a case that notices (You are harmless",
    ),
    (mutant_fails_everything, "mutant starts_at_zero fails every check: add a check that its"),
    (mutant_far_away, "mutant starts_at_zero differs from the solution in 7 lines; at most 5"),
    (mutant_crashes, "mutant starts_at_zero should fail a check, but its verdict is crashed ("),
    (mutant_is_refused, "mutant starts_at_zero is refused, so no learner can make this mistake"),
    (same_message, "mutants last_window_lost and starts_at_zero teach the same sentence"),
    (same_behaviour, "mutants copy and starts_at_zero look the same to every check: add a case"),
    (no_sentence, "mutant starts_at_zero: write teaches = the sentence to its author, and change"),
    (change_of_what_is_not_there, "None = None' stand in solution.py 0 times, and a change takes"),
    (change_that_is_no_python, "e90_1, mutant starts_at_zero: '(' was never closed"),
    (two_mutants, "there are 2 mutants; write at least 3"),
    (
        alternate_fails_a_check,
        "alternate.py does not pass with seed 0: fail (test_one_window: This does not",
    ),
    (alternate_imports_too_much, "alternate.py is refused: Line 3: import of 'itertools'"),
    (no_alternate, "alternate.py is missing in e90_1"),
    (solution_is_wrong, "solution.py does not pass with seed 0: fail (test_windows: the windows"),
    (solution_depends_on_the_seed, "solution.py does not pass with seed 1: fail (test_windows"),
    (starter_gives_the_answer, "the starter's verdict is fail (test_meter: the largest"),
    (starter_without_todo, "the starter's verdict is fail (test_meter: NotImplementedError"),
    (starter_of_another_exercise, "test_meter fails on the starter without its TODO: TODO e90.2"),
    (starter_untyped, "Meter.show in the starter has no type for number, the result"),
    (starter_undocumented, "window_sums in the starter has no docstring"),
    (starter_passes, "the starter passes test_nothing: that check asks for nothing"),
    (starter_passes, "test_nothing passes on an empty file: it does not call the submission"),
    (none_passes, "test_input passes when every function returns None: compare a value"),
    (agreeable_passes, "test_sum passes when every function returns an object of a kind of int "),
    (agreeable_set, "an object of a kind of int that agrees with everything: pass a result"),
    (mechanical_survive, "mechanical mutants of the solution, fewer than 85%. Add cases for"),
    (survivor_is_stale, "survivors names 'line 99: + -> -', which is no surviving mutant"),
    (no_readme, "README.md is missing or does not speak of e90.1"),
]


@pytest.mark.parametrize(("damage", "says"), ROT, ids=lambda value: getattr(value, "__name__", ""))
def test_a_fault_is_found_with_what_to_repair(
    toy_root: ToyRoot,
    damage: Callable[[ToyRoot], None],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if damage not in (mechanical_survive, survivor_is_stale):  # the others are faster without
        monkeypatch.setattr("minillm_exercises.verify.mechanical_mutants", lambda source: [])
    damage(toy_root)
    found = messages(toy_root)
    assert any(says in message for message in found), found
    assert all("Traceback" not in message and "\n" not in message for message in found)


def test_a_survivor_is_excused_with_a_reason(toy_root: ToyRoot) -> None:
    mechanical_survive(toy_root)
    (before,) = messages(toy_root)
    alive = before.split("why nothing changes: ")[1].rstrip(".").split("; ")
    excused = replace(toy_root.manifest["e90.1"], survivors=dict.fromkeys(alive, "adds nothing"))
    assert verify({"e90.1": excused}) == []


def test_a_problem_is_a_sentence_about_an_exercise() -> None:
    assert str(Problem("e90.1", "the README is missing.")) == "e90.1: the README is missing."


def test_returning_none_keeps_what_is_given() -> None:
    given = "K = 3\n\ndef given(x):\n    return x\n\ndef f(x):\n    "
    todo = "'''Doc.'''\n    raise NotImplementedError('TODO')\n"
    assert returning_none(given + todo) == given + "return None"


def test_returning_agreeable_stays_python() -> None:
    given = (
        "from __future__ import annotations\n\nclass C:\n    def __init__(self):\n        raise X"
    )
    source = returning_agreeable(f"{given}\n\n    def f(self):\n        raise X\n", "int")
    names: dict[str, Any] = {}
    exec(compile(source, "mine.py", "exec"), names)
    value = names["C"]().f()
    assert isinstance(value, int)
    assert value == 3 == value + 4
    assert value is value - "x"
    assert not value.__ne__(5)


def test_changed_lines_do_not_count_comments_and_docstrings() -> None:
    base = "def f(x):\n    '''Doc.'''\n    y = x + 1\n    return y\n"
    files = [
        base,
        base.replace("Doc.", "Other.").replace("y = x + 1", "y = (x  # why\n        + 1)"),
        base.replace("+ 1", "- 1"),
        base.replace("    return", "    y += 1\n    return"),
    ]
    assert [changed_lines(base, text) for text in files] == [0, 0, 1, 1]


MUTATED = """
def f(x: int = 0, *, deep=True):
    '''Doc 1 + 1.'''
    if x < 3 and not deep:
        x += 1
    for i in range(x):
        out[i] = i * 2
        print(i)
    if x == 9:
        raise ValueError(f"{x + 1}")
    return -x
"""
EXPECTED = [
    "line 2: True -> False",
    "line 2: 0 -> 1",
    "line 4: without if x < 3 and (not deep):",
    "line 4: x < 3 and (not deep) -> not x < 3 and (not deep)",
    "line 4: and -> or",
    "line 4: < -> <=",
    "line 4: 3 -> 4",
    "line 5: without x += 1",
    "line 5: + -> -",
    "line 5: 1 -> 2",
    "line 7: without out[i] = i * 2",
    "line 7: * -> +",
    "line 7: 2 -> 3",
    "line 8: without print(i)",
    "line 9: without if x == 9:",
    "line 9: x == 9 -> not x == 9",
    "line 9: == -> !=",
    "line 9: 9 -> 10",
]


def test_mechanical_mutants_change_one_thing_each() -> None:
    mutants = mechanical_mutants(MUTATED)
    assert [mutant.id for mutant in mutants] == EXPECTED
    assert len({mutant.source for mutant in mutants}) == len(EXPECTED)
    assert all("Doc 1 + 1." in mutant.source for mutant in mutants)
    by_id = {mutant.id: mutant.source for mutant in mutants}
    assert "if x <= 3 and (not deep):" in by_id["line 4: < -> <="]
    assert "x -= 1" in by_id["line 5: + -> -"]
    assert "f'{x + 1}'" in by_id["line 9: 9 -> 10"]


def test_mechanical_mutants_are_the_same_each_time_and_spread_when_capped() -> None:
    assert mechanical_mutants(MUTATED) == mechanical_mutants(MUTATED)
    few = mechanical_mutants(MUTATED, most=6)
    assert [mutant.id for mutant in few] == [EXPECTED[i * len(EXPECTED) // 6] for i in range(6)]
    assert mechanical_mutants("x = y") == []


def test_equal_changes_on_a_line_have_names_of_their_own() -> None:
    ids = [mutant.id for mutant in mechanical_mutants("x = a + b + c")]
    assert ids == ["line 1: + -> -", "line 1: + -> - (again 1)"]
