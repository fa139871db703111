"""Predictions: one small JSON file in the learner's folder, and the buttons that fill it."""

import json
from dataclasses import dataclass
from pathlib import Path

from minillm_exercises.widgets import buttons
from minillm_exercises.wording import wrapped
from minillm_exercises.workspace import Workspace, replace_text, work_root, writing


@dataclass(frozen=True)
class Prediction:
    """A question with its options by letter."""

    key: str
    question: str
    options: dict[str, str]

    def text(self) -> str:
        """The question as plain text, the static twin of the buttons."""
        lines = [f"  {letter})  {option}" for letter, option in self.options.items()]
        return "\n".join([wrapped(self.question), *(wrapped(line, " " * 6) for line in lines)])

    def show_buttons(self) -> None:
        """Offer buttons where a person can press them, and nothing in a test or a script."""
        buttons(self.options, self._choose, self._said())

    def _choose(self, letter: str) -> str:
        save_prediction(self.key, letter, self.options[letter])
        return self._said()

    def _said(self) -> str:
        known = load_prediction(self.key)
        return "Choose before you read on." if known is None else f"Recorded: {known[0]}."


def _path() -> Path:
    return work_root() / "predictions.json"


def _read() -> dict[str, list[str]] | None:
    """What is kept; None if the file is damaged."""
    try:
        entries = json.loads(_path().read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError:
        return None
    return entries if isinstance(entries, dict) else None


def load_prediction(key: str) -> tuple[str, str] | None:
    """The letter and the text chosen for `key`, or None."""
    entry = (_read() or {}).get(key)
    return (str(entry[0]), str(entry[1])) if isinstance(entry, list) and len(entry) == 2 else None


def save_prediction(key: str, letter: str, option: str) -> None:
    """Keep a choice; the last one counts. A damaged file is moved into `.history/` first.

    Raises:
        ExerciseError: the learner's folder cannot be written.
    """
    path, known = _path(), _read()
    if known is None:
        Workspace(work_root()).set_aside(path)
    with writing(path):
        replace_text(path, json.dumps((known or {}) | {key: [letter, option]}, indent=1))
