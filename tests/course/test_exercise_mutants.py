"""A mutant is a change to the solution: it is made where it says, or refused with the reason."""

import pytest

from minillm_exercises.errors import ExerciseError
from minillm_exercises.mutants import changed, load_mutants

SOURCE = (
    "def f(x):\n    y = x\n    y += 1\n\n    return y\n\n\ndef g(x):\n    y = x\n    return y\n"
)


@pytest.mark.parametrize(("change", "old", "new"), [
    ("-    y += 1\n+    y += 2", "y += 1", "y += 2"), ("-    y += 1", "    y += 1\n", ""),
    (" def g(x):\n+    x += 1", "def g(x):\n", "def g(x):\n    x += 1\n"),
    (" def g(x):\n-    y = x\n+    y = -x", "def g(x):\n    y = x", "def g(x):\n    y = -x"),
    ("     y += 1\n\n-    return y\n+    return 0", "\n\n    return y", "\n\n    return 0"),
])  # fmt: skip
def test_a_change_is_made_at_its_one_place(change, old, new):
    assert SOURCE.count(old) == 1
    assert changed(SOURCE, change) == SOURCE.replace(old, new)


def test_places_are_changed_one_after_the_other():
    change = "-    y += 1\n+    y += 2\n@@\n-    y += 2\n+    y += 3"
    assert changed(SOURCE, change) == SOURCE.replace("+= 1", "+= 3")


@pytest.mark.parametrize(("change", "says"), [
    ("-    y = x\n+    y = -x", "'y = x' stand in solution.py 2 times"),
    ("-    z = x", "'z = x' stand in solution.py 0 times"),
    ("     y += 1", "stand in solution.py 1 times, and a change takes some that"),
    ("-    y += 1\n*    y += 2", "begins with -, [+] or a blank, not '[*]'"),
])  # fmt: skip
def test_a_change_that_fits_nowhere_is_refused(change, says):
    with pytest.raises(ValueError, match=says):
        changed(SOURCE, change)


def test_only_added_lines_have_no_place():
    with pytest.raises(ValueError, match="times"):
        changed(SOURCE, "+    y = 1")


@pytest.mark.parametrize(("text", "says"), [
    ("[wrong", "mutants of e1 cannot be read"), ("[a]\nteaches = 'A.'", "mutant a: write teaches"),
    ("[a]\nteaches = ''\nchange = '-    y += 1'", "mutant a: write teaches"),
    ("[a]\nteaches = 'A.'\nchange = '-    y += 1'\nwhy = 'b'", "mutant a: write teaches"),
    ("a = 'A.'", "mutant a: write teaches"),
    ("[a]\nteaches = 'A.'\nchange = 1", "mutant a: write teaches"),
    ("[a]\nteaches = '\udcff'", "mutants of e1 cannot be read"),
    ("[a]\nteaches = 'A.'\nchange = '-    y += 1\\n+    y +'", "mutant a: "),
])  # fmt: skip
def test_a_file_that_is_damaged_says_where(tmp_path, text, says):
    answers = tmp_path / "e1"
    answers.mkdir()
    assert load_mutants(answers) == ()
    (answers / "solution.py").write_text(SOURCE)
    (answers / "mutants.toml").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ExerciseError, match=says):
        load_mutants(answers)
