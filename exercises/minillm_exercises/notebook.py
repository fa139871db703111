"""What a chapter says to its reader: predictions, facts and measured numbers.

A *fact* is exact and the same on every machine; the notebooks' tests compare it with the committed
output. A *record* is a measured number; it is never compared, and `notebooks/execute.py` keeps it
with the machine it came from, so that the prose can quote it without anybody typing it.
"""

import json
import os
import string
import sys
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm_exercises import disturbance
from minillm_exercises.errors import ExerciseError
from minillm_exercises.predictions import Prediction, load_prediction, save_prediction
from minillm_exercises.quiz import load_quiz, quiz_text
from minillm_exercises.turns import verdict
from minillm_exercises.widgets import buttons, is_live, mark

LETTERS = string.ascii_lowercase


def say(text: str) -> None:
    """Write one line for the reader."""
    sys.stdout.write(text + "\n")


def fact(name: str, value: bool | int | str | Fraction, unit: str = "") -> None:
    """Print ``name: value unit``, exact on every machine; large integers get thousands commas.

    Raises:
        ExerciseError: `value` is a float, whose last digits depend on the machine.
    """
    if not isinstance(value, bool | int | str | Fraction):
        raise ExerciseError(
            f"The fact {name!r} is a {type(value).__name__}; facts are exact: a bool, an int, a "
            f"Fraction, or a str that you rounded by exact arithmetic."
        )
    mark("fact")
    plain = isinstance(value, int) and not isinstance(value, bool)
    say(f"{name}: {f'{value:,}' if plain else value}{f' {unit}' if unit else ''}")


def record(name: str, value: float, unit: str = "", digits: int = 3) -> None:
    """Print a measured number with `digits` significant digits, and keep it for the prose when
    the chapter is executed for publication (MINILLM_RESULTS names the file)."""
    text = _significant(value, digits)
    say(f"measured: {name} = {text}{f' {unit}' if unit else ''}")
    others = 0.0 if os.environ.get("MINILLM_QUICK") else disturbance.meter().read()
    if warning := disturbance.warning(others):
        say(warning)
    if results := os.environ.get("MINILLM_RESULTS"):
        entry = {"name": name, "value": float(value), "unit": unit, "text": text}
        line = json.dumps(entry | {"others": round(others, 2)})
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _significant(value: float, digits: int) -> str:
    """`value` with so many significant digits, without an exponent: 49100 is '49,100'."""
    rounded = float(f"{value:.{digits}g}")
    if not 0.1 <= abs(rounded) < float("inf"):
        return f"{rounded:.{digits}g}"
    decimals = max(0, digits - len(str(int(abs(rounded)))) + (abs(rounded) < 1))
    return f"{rounded:,.{decimals}f}"


def predict(key: str, question: str, options: Sequence[str], choice: str | None = None) -> None:
    """Ask the reader to choose before the answer is on the page.

    `options` are two to four, named a, b, c, d. In a live notebook buttons record the choice;
    ``choice="b"`` records it in code. It is kept in the learner's folder under `key`
    ("03.clock"), and `compare` shows it again after the measurement.

    Raises:
        ExerciseError: the wrong number of options, or a choice that is none of them.
    """
    if not 2 <= len(options) <= 4:
        raise ExerciseError(f"predict({key!r}) has {len(options)} options; give two to four.")
    named = dict(zip(LETTERS, options, strict=False))
    if choice is not None:
        letter = _letter(choice, named)
        save_prediction(key, letter, named[letter])
    mark("predict")
    prediction = Prediction(key, question, named)
    say(prediction.text())
    prediction.show_buttons()


def compare(
    key: str, measured: str, best: str, found: str = "Measured", between: bool = False
) -> None:
    """Put the reader's prediction beside what was measured; `best` is the option that holds it.

    `found` says how, where nothing was measured: "Counted", "Computed". With `between` the value
    lies between two options, and `best` is the nearest one.
    """
    mark("result")
    known = load_prediction(key)
    option = f"nearest to {best}" if between else best
    if known is None:
        say(f"{found}: {measured}. That is {option}.")
        return
    right = "as you said" if known[0] == best else f"that is {option}"
    verdict = f"nearest to {best}, as you said" if between and known[0] == best else right
    say(f"You said {known[0]}: {known[1]}. {found}: {measured}, {verdict}.")


def _letter(choice: Any, named: Mapping[str, str]) -> str:
    letter = str(choice).strip().lower()
    if letter not in named:
        raise ExerciseError(f"The choice {choice!r} is none of {', '.join(named)}.")
    return letter


def turn(name: str, answer: Any) -> None:
    """Check the small task `name` of the page: say whether `answer` is right and why, or a hint.
    With `...` or None in it, it is not filled in yet; "give up" shows a right one."""
    mark("turn")
    try:
        say(verdict(name, answer))
    except ExerciseError as error:
        say(str(error))


def task(exercise_id: str) -> None:
    """Show the task of an exercise and the file to begin with, which a button of JupyterLab puts
    into the next cell."""
    mark("exercise")
    page = _show("task_here", exercise_id)
    if is_live() and hasattr(page, "button"):
        from IPython.display import HTML, display

        display(HTML(page.button))


def check(exercise_id: str, *solution: Any) -> None:
    """Grade an exercise and show the verdict. With the function or class written in this notebook
    it is first saved into the learner's folder, so that the command line grades the same file."""
    mark("exercise")
    _show("check_here", exercise_id, *solution)


def hint(exercise_id: str) -> None:
    """Show the next hint of an exercise: first the idea, then where to look, then the steps."""
    _show("hint_here", exercise_id)


def _show(what: str, *arguments: Any) -> Any:
    """Show what a function of `report` returns, and return it; none raises: a mistake becomes the
    text shown."""
    from IPython.display import display

    from minillm_exercises import report  # the grader: only when it is asked for

    display(shown := getattr(report, what)(*arguments))
    return shown


def engine(*prompts: str) -> None:
    """Put the exercises that you have passed together, and serve prompts with them.

    Never raises: what is missing becomes the text that is shown.
    """
    from minillm_exercises.assemble import assemble, run_engine
    from minillm_exercises.session import Session

    try:
        file, lines = assemble(Session.open())
    except MinillmError as error:
        say(str(error))
        return
    say("\n".join([*lines, "", run_engine(file, prompts, capture=True)[1]]))


def quiz(chapter: str, answers: str = "") -> None:
    """Ask a chapter's questions, with buttons in a live notebook; or, with `answers` such as
    "b a c", say what each is worth and why."""
    mark("quiz")
    try:
        if answers.strip() or not is_live():
            say(quiz_text(chapter, answers))
            return
        for number, question in enumerate(load_quiz(chapter), 1):
            say(question.asked(number))
            buttons(question.by_letter(), partial(question.answered, number))
    except ExerciseError as error:
        say(str(error))
