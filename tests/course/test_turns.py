"""Small tasks of the chapters: sealed answers, and a learner's copy without them."""

import base64
import json
import zlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from notebook_chapter import NOTEBOOKS, lab, prose
from toy_notebooks import code, notebook

from minillm_exercises import turn, turns
from minillm_exercises.errors import ExerciseError

FUNCTION = """\
def size(layers, width):
    both = 2 * width  # answer
    for _ in range(1):  # answer
        both = both * layers  # answer
    return both  # answer


turn("90.size", [size(2, 3), size(1, 1)])"""


def accepted(answer, expected):
    """Whether an answer has the hash of what was sealed."""
    digits, right, _ = turns.sealed("90.size", expected, "A hint.").split()
    return turns.hashed("90.size", answer, int(digits)) == right


@pytest.mark.parametrize(("answer", "expected", "right"), [
    (131_072, 131_072, True), (131_072.0, 131_072, True), (131_071, 131_072, False),
    (0.1 + 0.2, 0.3, True), (0.31, 0.3, False), ("0.3", 0.3, False), (True, 1.0, False),
    (True, True, True), (1, True, False), ([1, (2, 3)], [1, [2, 3]], True),
    ([1, 2], [1, 2, 3], False), (3, [3], False), ({"a": 1}, {"a": 1}, True),
    ({"b": 1}, {"a": 1}, False), (np.array([1.0, 2.0]), np.array([1.0, 2.0 + 1e-7]), True),
    (np.array([1.0, 2.0]), np.array([1.0, 2.1]), False), (np.zeros(3), np.zeros(2), False),
    ([1.0, 2.0], np.array([1.0, 2.0]), True),
    (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), True),
    (torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0]), False), (torch.tensor([1, 2]), 3, False),
    (torch.tensor(0.3), 0.3, True), (np.float32(0.3), 0.3, True),
    (torch.tensor([True, False]), torch.tensor([True, False]), True),
    (torch.tensor([True, False]), torch.tensor([True, True]), False), (1000001, 1000000, False),
    (len, 3, False), (12 * 0.3, 3.6, True), (20.97152 * (1 + 1e-6), 20.97152, True),
    (20.99, 20.97152, False), (0.2, Fraction(1, 5), True), (Fraction(2, 5), Fraction(1, 5), False),
    (999.9999999999, 1000, True), (10**400, 1.5, False), (10**400, 10**400, True),
    (1e-17, 0.0, True), (float("nan"), 1.0, False), (np.array([np.nan]), np.array([1.0]), False),
    (float("inf"), 1, False), ("calls", "calls", True), ("a", "b", False),
])  # fmt: skip
def test_answers_are_compared(answer, expected, right):
    assert accepted(answer, expected) is right


@pytest.mark.parametrize("answer", [2.0005, 0.66665, 123450.0, 20.97152, 0.005, 1 / 3, 7.77777])
def test_an_error_of_rounding_changes_no_hash(answer):
    for by in (1 - 9e-6, 1 - 1e-15, 1 + 1e-15, 1 + 9e-6):
        assert accepted([1, answer * by], (1, answer))
    assert not accepted([1, answer * 1.01], (1, answer))


@pytest.fixture
def said(monkeypatch, capsys):
    """What a learner reads for an answer to the toy question 90.size, whose answer is 2000; chapter
    90b has a question of the same name."""
    known = {
        name: turns.sealed(name, 2000, "Two vectors.", "Keys and values.")
        for name in ("90.size", "90b.size")
    }
    monkeypatch.setattr(turns, "load_turns", lambda: known)

    def ask(answer, name="90.size"):
        turn(name, answer)
        return capsys.readouterr().out.rstrip("\n")

    return ask


@pytest.mark.parametrize("answer", [..., None, [1, ...], (None, 2), {"a": ...}])
def test_an_open_task_says_what_to_do(answer, said):
    text = " ".join(said(answer).split())
    assert text.startswith("Your turn: replace the dots above, and run this cell again.")
    assert text.endswith('turn("90.size", "give up") shows an answer.')


def test_a_wrong_answer_gets_a_hint_and_a_right_one_the_reason(said):
    assert said(1000) == "Not yet: your answer is 1,000. Two vectors."
    assert said(2000) == "Right: 2,000. Keys and values."
    assert said([1 / 3]) == "Not yet: your answer is [0.3333]. Two vectors."
    assert said(1, "90.wide") == "There is no question '90.wide'; this chapter has: 90.size."
    assert said("90.size", [1]) == "There is no question [1]; this chapter has: none."


def test_who_gives_up_reads_the_published_answer(said, monkeypatch, tmp_path):
    assert "not on this machine" in said("give up")
    (tmp_path / "notebooks").mkdir()
    for chapter, source in {"90": FUNCTION, "90b": FUNCTION.replace("both", "twice")}.items():
        cell = code(source.replace("90.", f"{chapter}."), "turn")
        page = json.dumps(notebook(code("x = 1"), cell))
        (tmp_path / "notebooks" / f"{chapter}_toy.ipynb").write_text(page)
    monkeypatch.setattr(turns, "exercises_root", lambda: tmp_path / "exercises")
    first, *lines = said("give up").splitlines()
    assert first == "An answer, in place of the dots:"
    assert lines[0] == "    both = 2 * width"
    assert len(lines) == 4
    assert "    twice = 2 * width" in said("give up", "90b.size")


def test_without_its_file_it_says_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(turns, "exercises_root", lambda: tmp_path)
    turn("03.passes", 18)
    assert "answers of the small tasks cannot be read" in capsys.readouterr().out


def test_the_file_shows_no_answer_in_plain_text_and_hints_tell_none():
    for name, entry in turns.load_turns().items():
        digits, right, said = entry.split()
        hint, why = json.loads(zlib.decompress(base64.b64decode(said)))
        assert hint[-1] in ".?" and why[-1] == "."  # noqa: PT018
        words = hint.replace(",", "").rstrip(".?").split()
        numbers = [float(word) for word in words if word.replace(".", "").isdigit()]
        found = [turns.hashed(name, each, int(digits)) for each in numbers if each > prose.FREE]
        assert right not in found, name


def test_a_learner_gets_dots_and_no_answer(tmp_path):
    assert turns.blanked(FUNCTION).splitlines()[:3] == [
        "def size(layers, width):",
        "    ...  # your turn",
        "",
    ]
    assert turns.blanked("a, b = 1, 2  # answer\nx(a)") == "a, b = ..., ...  # your turn\nx(a)"
    assert turns.blanked("a = 1  # answer\nb = 2  # answer").count("...") == 2
    made = notebook(code(FUNCTION, "turn", says="Right: [12, 2].\n"))
    (task,) = lab.stripped(made, tmp_path)["cells"]
    assert "both" not in task["source"] and not task["outputs"]  # noqa: PT018


def test_no_copy_of_the_course_holds_an_answer_line(tmp_path):
    lab.prepare(NOTEBOOKS, tmp_path)
    for path in tmp_path.glob("*.ipynb"):
        assert "# answer" not in path.read_text("utf-8"), path.name


def test_a_cell_without_an_answer_is_refused():
    with pytest.raises(ExerciseError, match="no line that ends in"):
        turns.blanked('turn("90.size", 1)')
