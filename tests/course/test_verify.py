"""`verify` on sound toys, and on toys that rotted in every way it promises to find."""

from dataclasses import replace
from typing import Any

import pytest

from conftest import ToyRoot
from minillm_exercises.checking import seeds
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise
from minillm_exercises.mutation import mechanical_mutants
from minillm_exercises.verify import changed_lines, returning_agreeable, returning_none, verify
from tests.pairs import one_in

CHECKS = "e90_windows/test_e90_1.py"
STARTER = "e90_windows/e90_1.py"
SOLUTION = "_solutions/e90_1/solution.py"
ALTERNATE = "_solutions/e90_1/alternate.py"
MUTANTS = "_solutions/e90_1/mutants.toml"
ZERO = "+        self.largest: int = 0\n"  # the mistake of starts_at_zero


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


MUTANT = "\n[{}]\nteaches = '{}'\nchange = '''\n{}'''\n"
ALL_WRONG = """@@
-        return self.largest
+        return self.largest + 1
@@
-    return [sum(numbers[start : start + size]) for start in starts]
+    return [1 + sum(numbers[start : start + size]) for start in starts]
"""
BEFORE_RETURN = "@@\n+        {}\n         return self.largest\n"
TEACHES = "The largest so far begins at 0, so negative numbers never show."
CHECK = "\n\n@check(points=1, task='one more')\ndef test_more(impl):\n    "
AGREES = "expect(impl.window_sums([1, 2], 1) == [1, 2], 'not equal')\n"
IN_A_SET = "expect(len({impl.window_sums([1, n], 1)[0] for n in (1, 2)}) == 1, 'they differ')\n"
UNTOUCHED = "mine = [1]\n    impl.window_sums(mine, 1)\n    equal(mine, [1], 'your input')\n"
EXPECT = (CHECKS, "import check,", "import check, expect,")
USELESS = (SOLUTION, "    starts = ", "    size = size * 7 // 7 + 0 - 0 + 5 * 0\n    starts = ")
SURVIVOR = '\n["e90.1".survivors]\n"line 99: + -> -" = "no case reaches it"\n\n["e91.1"]'

# What verify says, and what rots: in a file, a text ("": its end) and what comes in its place.
ROT = [
    ("This check compared nothing, so it cannot pass",
     (CHECKS, "    equal(impl", "    (lambda *a: a)(impl")),
    ("mutant harmless passes every check: add a case that notices (You are harmless",
     (MUTANTS, "", MUTANT.format("harmless", "You are harmless.", "-        return self.largest\n"
                                 "+        return +self.largest\n"))),
    ("mutant starts_at_zero fails every check: add a check that its",
     (MUTANTS, ZERO, ZERO + ALL_WRONG)),
    ("mutant starts_at_zero should fail a check, but its verdict is crashed (",
     (MUTANTS, ZERO, ZERO + BEFORE_RETURN.format("exit()"))),
    ("mutants last_window_lost and starts_at_zero teach the same sentence",
     (MUTANTS, TEACHES, "The last window is lost: there are len - size + 1 starts.")),
    ("mutants copy and starts_at_zero look the same to every check: add a case",
     (MUTANTS, "", MUTANT.format("copy", "Another.", f"-        self.largest: int | None = None\n"
                                 f"{ZERO}"))),
    ("there are 0 mutants; write at least 3", (MUTANTS, None, "")),
    ("alternate.py does not pass with seed 0: fail (test_one_window: This does not",
     (ALTERNATE, "return sums", "return tuple(sums)"),
     (CHECKS, "    equal(impl.window",
      "    assert isinstance(impl.window_sums([1], 1), list)\n    equal(impl.window")),
    ("solution.py does not pass with seed 1: fail (test_windows",
     (CHECKS, "want = [", f"want = [0] if {next(seeds(1))} not in seeds(1) else [")),
    ("the starter's verdict is fail (test_meter: the largest",
     (STARTER, 'raise NotImplementedError("TODO e90.1: the largest so far")', "return None")),
    ("test_meter fails on the starter without its TODO: TODO e90.2",
     (STARTER, "TODO e90.1: the largest", "TODO e90.2: the largest")),
    ("Meter.show in the starter has no type for number, the result",
     (STARTER, "number: int) -> int", "number)")),
    ("the starter passes test_more: that check asks for nothing",
     (CHECKS, "", CHECK + "equal(1, 1, 'one')\n")),
    ("test_more passes when every function returns None: compare a value",
     (CHECKS, "", CHECK + UNTOUCHED)),
    ("test_more passes when every function returns an object of a kind of int ",
     EXPECT, (CHECKS, "", CHECK + AGREES)),
    ("an object of a kind of int that agrees with everything: pass a result",
     EXPECT, (CHECKS, "", CHECK + IN_A_SET)),
    ("mechanical mutants of the solution, fewer than 85%. Add cases for", USELESS),
    ("survivors names 'line 99: + -> -', which is no surviving mutant",
     ("exercises.toml", '\n["e91.1"]', SURVIVOR)),
    ("README.md is missing or does not speak of e90.1", ("e90_windows/README.md", None, "")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("says", "edits"),
    one_in(2, ((each[0], each[1:]) for each in ROT)),
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_a_fault_is_found_with_what_to_repair(toy_root, says, edits, monkeypatch):
    if "surviv" not in says and "mechanical" not in says:  # the others are faster without
        monkeypatch.setattr("minillm_exercises.verify.mechanical_mutants", lambda source: [])
    for edit in edits:
        toy_root.edit(*edit)
    found = messages(toy_root)
    assert any(says in message for message in found), found
    assert all("Traceback" not in message and "\n" not in message for message in found)


@pytest.mark.slow
def test_a_survivor_is_excused_with_a_reason(toy_root: ToyRoot) -> None:
    toy_root.edit(*USELESS)
    (before,) = messages(toy_root)
    alive = before.split("why nothing changes: ")[1].rstrip(".").split("; ")
    excused = replace(toy_root.manifest["e90.1"], survivors=dict.fromkeys(alive, "adds nothing"))
    assert verify({"e90.1": excused}) == []


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
    "line 2: True -> False", "line 2: 0 -> 1", "line 4: without if x < 3 and (not deep):",
    "line 4: x < 3 and (not deep) -> not x < 3 and (not deep)", "line 4: and -> or",
    "line 4: < -> <=", "line 4: 3 -> 4", "line 5: without x += 1", "line 5: + -> -",
    "line 5: 1 -> 2", "line 7: without out[i] = i * 2", "line 7: * -> +", "line 7: 2 -> 3",
    "line 8: without print(i)", "line 9: without if x == 9:", "line 9: x == 9 -> not x == 9",
    "line 9: == -> !=", "line 9: 9 -> 10",
]  # fmt: skip


def test_mechanical_mutants_change_one_thing_each() -> None:
    mutants = mechanical_mutants(MUTATED)
    assert [mutant.id for mutant in mutants] == EXPECTED
    assert len({mutant.source for mutant in mutants}) == len(EXPECTED)
    assert all("Doc 1 + 1." in mutant.source for mutant in mutants)
    by_id = {mutant.id: mutant.source for mutant in mutants}
    assert "if x <= 3 and (not deep):" in by_id["line 4: < -> <="]
    assert "x -= 1" in by_id["line 5: + -> -"]
    assert "f'{x + 1}'" in by_id["line 9: 9 -> 10"]
