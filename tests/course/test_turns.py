"""Small tasks of the chapters: comparing answers, and a learner's copy without them."""

import numpy as np
import pytest
import torch
from notebook_chapter import lab
from toy_notebooks import code, notebook

from minillm_exercises import turn, turns
from minillm_exercises.errors import ExerciseError

FUNCTION = """\
def size(layers, width):
    both = 2 * width  # answer
    return layers * both  # answer


turn([size(2, 3), size(1, 1)], [12, 2], "Keys and values.")"""


@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        (131_072, 131_072, True),
        (131_072.0, 131_072, True),
        (131_071, 131_072, False),
        (0.1 + 0.2, 0.3, True),
        (0.31, 0.3, False),
        ("0.3", 0.3, False),
        (True, 1.0, False),
        (True, True, True),
        (1, True, False),
        ([1, (2, 3)], [1, [2, 3]], True),
        ([1, 2], [1, 2, 3], False),
        (3, [3], False),
        ({"a": 1}, {"a": 1}, True),
        ({"b": 1}, {"a": 1}, False),
        (np.array([1.0, 2.0]), np.array([1.0, 2.0 + 1e-7]), True),
        (np.array([1.0, 2.0]), np.array([1.0, 2.1]), False),
        (np.zeros(3), np.zeros(2), False),
        ([1.0, 2.0], np.array([1.0, 2.0]), True),
        (np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1, 2]), 3, False),
        (torch.tensor(0.3), 0.3, True),
        (np.float32(0.3), 0.3, True),
        (torch.tensor([True, False]), torch.tensor([True, False]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (1000001, 1000000, False),
        (len, 3, False),
    ],
)
def test_answers_are_compared(answer, expected, right):
    assert turns.same(answer, expected) is right


def test_nan_is_not_right():
    assert not turns.same(np.array([np.nan]), np.array([1.0]))
    assert not turns.same(float("nan"), 1.0)


@pytest.mark.parametrize("answer", [..., None, [1, ...], (None, 2), {"a": ...}])
def test_an_open_task_says_what_to_do(answer, capsys):
    turn(answer, 1, "A hint.")
    said = capsys.readouterr().out
    assert said.startswith("Your turn: replace the dots")
    assert "hint" not in said


def test_the_hint_comes_with_a_wrong_answer_only(capsys):
    turn(1000, 2000, "Keys and values.")
    turn(2000, 2000, "Keys and values.")
    said = capsys.readouterr().out.splitlines()
    assert said == ["Not yet: your answer is 1,000. Keys and values.", "Right: 2,000."]


def test_a_learner_gets_dots_and_a_folded_answer():
    assert turns.blanked(FUNCTION).splitlines()[:3] == [
        "def size(layers, width):",
        "    ...  # your turn",
        "",
    ]
    assert turns.blanked("a, b = 1, 2  # answer\nturn(a, 1, 'x')").startswith("a, b = ..., ...  #")
    assert turns.blanked("a = 1  # answer\nb = 2  # answer").count("...") == 2
    made = lab.stripped(notebook(code(FUNCTION, "turn", says="Right: [12, 2].\n")))
    task, answer = made["cells"]
    assert "both" not in task["source"] and not task["outputs"]  # noqa: PT018
    assert "    both = 2 * width\n" in answer["source"] and "# answer" not in answer["source"]  # noqa: PT018
    assert answer["source"].startswith("<details>") and answer["id"] == "c0-answer"  # noqa: PT018


def test_a_cell_without_an_answer_is_refused():
    with pytest.raises(ExerciseError, match="no line that ends in"):
        turns.blanked("turn(1, 1, 'x')")
