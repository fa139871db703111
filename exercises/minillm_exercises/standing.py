"""Where a learner stands: every exercise with its points, whether it can be done here, and which
one to do next."""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from minillm_exercises.errors import ExerciseError
from minillm_exercises.grader import list_checks
from minillm_exercises.manifest import Exercise
from minillm_exercises.progress import Entry, Progress
from minillm_exercises.results import CheckResult
from minillm_exercises.workspace import Workspace

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


def standing(exercise: Exercise, workspace: Workspace, entry: Entry) -> Standing:
    """Where the learner stands with one exercise."""
    points = max_points(exercise)
    why = unavailable(exercise)
    begun = workspace.begun(exercise)
    state: State = "begun" if begun else "open"
    if entry.status == "pass" and begun:
        state = "done"
    elif why:
        state = "unavailable"
    earned = min(entry.earned, points) if begun else 0
    return Standing(exercise, state, earned, points, why, workspace.outdated(exercise))


def standings(
    manifest: Mapping[str, Exercise], workspace: Workspace, progress: Progress
) -> tuple[Standing, ...]:
    """Where the learner stands with every exercise, in the course's order."""
    return tuple(standing(e, workspace, progress.of(e.id)) for e in manifest.values())


def suggestion(rows: Sequence[Standing], last: str = "") -> Standing | None:
    """What to do next: the exercise last worked on if it is not done, else the next one begun,
    else the next one not begun, in order from there; None when all that can be done here is."""
    ids = [row.exercise.id for row in rows]
    start = ids.index(last) if last in ids else 0
    ahead = [*rows[start:], *rows[:start]]
    begun = [row for row in ahead if row.state == "begun"]
    return next(iter([*begun, *(row for row in ahead if row.state == "open")]), None)
