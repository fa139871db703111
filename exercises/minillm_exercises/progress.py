"""What is remembered of a learner: one small JSON file that can be copied to another machine.

Every change is read, changed and replaced under a lock, so that a `watch` in one window and a
notebook in another do not lose each other's entries. Fields that this version does not know are
kept as they are.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from minillm_exercises.errors import ExerciseError
from minillm_exercises.workspace import Workspace, replace_text, shown_path, writing

SCHEMA = 1
PATIENCE = 2.0  # seconds; a lock older than that was left by a process that died


@dataclass(frozen=True)
class Entry:
    """What is known of one exercise; `status`, `earned` and `points` are of the last grading."""

    attempts: int = 0
    hints: int = 0
    status: str = ""
    earned: int = 0
    points: int = 0
    passed: bool = False  # once is enough: it opens the solution
    gave_up: bool = False


@dataclass(frozen=True)
class Progress:
    """Every entry by exercise id, the exercise last worked on, and what was wrong with the file."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    last: str = ""
    notice: str = ""

    def of(self, exercise_id: str) -> Entry:
        """The entry of an exercise, also of one that was never begun."""
        return self.entries.get(exercise_id, Entry())


@dataclass(frozen=True)
class ProgressFile:
    """The file ``work/progress.json``."""

    path: Path

    def read(self) -> Progress:
        """What the file says. A damaged file is set aside and reported in `notice`."""
        try:
            data, notice = self._load()
        except OSError as error:
            why = error.strerror or str(error)
            return Progress(notice=f"{self.path.name} cannot be read ({why}).")
        entries = {key: _entry(value) for key, value in data["exercises"].items()}
        last = data.get("last")
        return Progress(entries, last if isinstance(last, str) else "", notice)

    def update(self, exercise_id: str, change: Callable[[Entry], Entry]) -> Entry:
        """Change one entry, make its exercise the last one worked on, and return the entry.

        Raises:
            ExerciseError: the file cannot be written.
        """
        with writing(self.path), _locked(self.path.with_suffix(".lock")):
            data, _ = self._load()
            old = data["exercises"].get(exercise_id, {})
            entry = change(_entry(old))
            data["exercises"][exercise_id] = {**old, **asdict(entry)}
            replace_text(self.path, json.dumps({**data, "last": exercise_id}, indent=1) + "\n")
        return entry

    def set(self, exercise_id: str, **fields: Any) -> Entry:
        """`update` with new values of some fields."""
        return self.update(exercise_id, lambda entry: replace(entry, **fields))

    def _load(self) -> tuple[dict[str, Any], str]:
        """The file as it is, and what had to be done about it."""
        empty = {"version": SCHEMA, "last": "", "exercises": {}}
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return empty, ""
        except ValueError:
            data = None
        known = data.get("exercises") if isinstance(data, dict) else None
        if isinstance(known, dict) and all(isinstance(value, dict) for value in known.values()):
            return data, ""
        return empty, self._set_aside()

    def _set_aside(self) -> str:
        where = f"cannot be moved away from {shown_path(self.path)}"
        with suppress(ExerciseError):
            where = f"is now {shown_path(Workspace(self.path.parent).set_aside(self.path))}"
        return (
            f"{self.path.name} was damaged and {where}; your solutions are untouched, and "
            f"`run --all` counts them again."
        )


def _entry(data: Mapping[str, Any]) -> Entry:
    """An entry from JSON; a value of the wrong type counts as absent."""
    default = Entry()
    fields = {
        name: data[name]
        for name, value in asdict(default).items()
        if type(data.get(name)) is type(value)
    }
    return replace(default, **fields)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file: O_EXCL also works where advisory locks do not (network disks, Windows)."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        except FileExistsError:
            if time.monotonic() > deadline:
                break  # its owner died: this process takes it over
            time.sleep(0.01)
        except PermissionError:  # Windows: the lock is being deleted
            if os.name != "nt" or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    try:
        yield
    finally:
        with suppress(OSError):
            path.unlink()
