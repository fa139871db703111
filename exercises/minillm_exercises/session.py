"""One learner at work: the exercises, the learner's folder and what is remembered, together; and
where the learner stands with every exercise.

The command line, the watcher and the notebooks grade through `Session.run`, so that all of them
count the same attempts and show the same verdict.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from minillm.errors import MinillmError
from minillm_exercises.errors import ExerciseError
from minillm_exercises.grader import grade, list_checks
from minillm_exercises.manifest import Exercise, find, load_manifest
from minillm_exercises.progress import Entry, Progress, ProgressFile
from minillm_exercises.results import CheckResult, Verdict
from minillm_exercises.workspace import Workspace, work_root

Grade = Callable[..., Verdict]
State = Literal["done", "begun", "open", "unavailable"]


@dataclass(frozen=True)
class Standing:
    """One line of the board; `why` says what is missing here when `state` is "unavailable"."""

    exercise: Exercise
    state: State
    earned: int
    points: int
    why: str = ""
    outdated: bool = False


def checks_of(exercise: Exercise) -> tuple[CheckResult, ...]:
    """The public checks as not yet run; none where their file is missing or broken."""
    try:
        return list_checks(exercise)
    except ExerciseError:
        return ()


def max_points(exercise: Exercise) -> int:
    """The points of all public checks of an exercise."""
    return sum(check.points for check in checks_of(exercise))


def unavailable(exercise: Exercise) -> str:
    """Why an exercise cannot be done on this machine, in a few words; empty when it can."""
    if not exercise.checks.is_file() or not exercise.starter.is_file():
        return "its files are missing"
    for need in exercise.needs:
        if need == "gpu":
            if not _has_gpu():
                return "needs a GPU"
        elif importlib.util.find_spec(need) is None:
            return f"needs {need}"
    return ""


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    from minillm_exercises.doctor import torch_facts  # imports torch, so only if needed

    return bool(torch_facts().get("cuda"))


@dataclass(frozen=True)
class Session:
    """The exercises, the learner's folder and the grader."""

    manifest: Mapping[str, Exercise]
    workspace: Workspace
    grade: Grade = field(default=grade)

    @classmethod
    def open(cls) -> "Session":
        """The course that this package is part of, and the learner's folder."""
        return cls(load_manifest(), Workspace(work_root()))

    @property
    def progress_file(self) -> ProgressFile:
        """The file that remembers."""
        return ProgressFile(self.workspace.root / "progress.json")

    def progress(self) -> Progress:
        """What is remembered now."""
        return self.progress_file.read()

    def find(self, name: str) -> Exercise:
        """The exercise `name`: "e03.1", and also "3.1", "E03_1" or "e03_1.py".

        Raises:
            ExerciseError: there is none; the nearest is proposed.
        """
        return find(canonical(name), dict(self.manifest))

    def current(self, name: str | None) -> Exercise:
        """The exercise `name`, or without a name the one last worked on, or the one suggested.

        Raises:
            ExerciseError: there is no exercise of that name, or none at all.
        """
        if name:
            return self.find(name)
        last = self.progress().last
        if last in self.manifest:
            return self.manifest[last]
        if (row := self.suggestion()) is None:
            raise ExerciseError("No exercise can be done here; `doctor` says what is missing.")
        return row.exercise

    def standings(self) -> tuple[Standing, ...]:
        """Where the learner stands with every exercise, in the course's order."""
        progress = self.progress()
        return tuple(self._standing(e, progress.of(e.id)) for e in self.manifest.values())

    def _standing(self, exercise: Exercise, entry: Entry) -> Standing:
        points, why = max_points(exercise), unavailable(exercise)
        begun, outdated = self.workspace.begun(exercise), self.workspace.outdated(exercise)
        state: State = "begun" if begun else "open"
        if entry.status == "pass" and begun:
            state = "done"
        elif why:
            state = "unavailable"
        earned = min(entry.earned, points) if begun else 0
        return Standing(exercise, state, earned, points, why, outdated)

    def suggestion(self) -> Standing | None:
        """What to do next."""
        return suggestion(self.standings(), self.progress().last)

    def start(self, exercise: Exercise) -> Path:
        """Give the learner the starter, unless there is a file already.

        Raises:
            ExerciseError: the exercise cannot be done here, or the folder cannot be written.
        """
        if why := unavailable(exercise):
            raise ExerciseError(
                f"{exercise.id} cannot be done here: it {why}; `doctor` says what to do about it."
                if why.startswith("needs")
                else f"{exercise.id} cannot be done here: {why}; get the course's files again."
            )
        path = self.workspace.start(exercise)
        self.progress_file.update(exercise.id, lambda entry: entry)
        return path

    def run(self, exercise: Exercise, file: Path | None = None, seed: int = 0) -> Verdict:
        """Grade the learner's file and remember the outcome, or grade `file` and remember nothing.

        Raises:
            ExerciseError: the exercise is not begun, or `file` does not exist.
        """
        if file is not None:
            if not file.is_file():
                raise ExerciseError(f"There is no file {str(file)!r}; give the path of a .py file.")
            return self.judge(exercise, file, seed)
        if not self.workspace.begun(exercise):
            raise ExerciseError(
                f"{exercise.id} is not begun: `start {exercise.id}` gives you its file first."
            )
        verdict = self.judge(exercise, self.workspace.file(exercise), seed)
        self.remember(exercise, verdict)
        return verdict

    def judge(self, exercise: Exercise, file: Path, seed: int = 0) -> Verdict:
        """Grade a file; whatever goes wrong becomes a verdict, so that the others are graded."""
        if why := unavailable(exercise):
            return Verdict(exercise.id, "missing", message=f"It cannot be graded here: {why}.")
        try:
            return self.grade(exercise, file, seed=seed)
        except MinillmError as error:
            return Verdict(exercise.id, "crashed", message=str(error))
        except Exception as error:  # a bug of the grader must not stop the other exercises
            reason = f"{type(error).__name__}: {error}"
            return Verdict(
                exercise.id,
                "crashed",
                message=f"The grader itself failed ({reason}); your code is not to blame.",
            )

    def remember(self, exercise: Exercise, verdict: Verdict) -> Entry:
        """Count an attempt (an untouched starter is none) and keep its outcome."""

        def after(entry: Entry) -> Entry:
            return replace(
                entry,
                attempts=entry.attempts + (verdict.status != "todo"),
                status=verdict.status,
                earned=verdict.earned,
                points=max_points(exercise),
                passed=entry.passed or verdict.status == "pass",
            )

        return self.progress_file.update(exercise.id, after)

    def take_hint(self, exercise: Exercise, number: int | None = None) -> tuple[int, Entry]:
        """Count one hint more, or up to `number`; return how many to show.

        Raises:
            ExerciseError: `number` is not 1, 2 or 3.
        """
        most = len(exercise.hints)
        if number is not None and not 1 <= number <= most:
            raise ExerciseError(
                f"There are hints 1 to {most}, not {number}; without a number you get the next."
            )
        seen = self.progress().of(exercise.id).hints
        shown = min(seen + 1, most) if number is None else number
        return shown, self.progress_file.set(exercise.id, hints=max(seen, shown))


def canonical(name: str) -> str:
    """An exercise's id as the manifest writes it, from the ways people write it."""
    chapter, dot, number = name.strip().lower().replace("_", ".").removeprefix("e").partition(".")
    return (
        f"e{chapter.zfill(2)}.{number.removesuffix('.py')}" if dot and chapter.isdigit() else name
    )


def suggestion(rows: Sequence[Standing], last: str = "") -> Standing | None:
    """What to do next: the exercise last worked on if it is not done, else the next one begun,
    else the next one not begun, in order from there; None when all that can be done here is."""
    ids = [row.exercise.id for row in rows]
    start = ids.index(last) if last in ids else 0
    ahead = [*rows[start:], *rows[:start]]
    begun = [row for row in ahead if row.state == "begun"]
    return next(iter([*begun, *(row for row in ahead if row.state == "open")]), None)
