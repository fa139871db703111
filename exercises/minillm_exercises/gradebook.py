"""Grading a class: a folder of submissions, the instructor's own seed and hidden checks.

Hidden checks are files ``test_eNN_M.py`` in the same language as the public ones. They count
beside the public checks, and no misconception is looked for in them.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError
from minillm_exercises.errors import ExerciseError
from minillm_exercises.grader import Grader
from minillm_exercises.manifest import Exercise
from minillm_exercises.results import Verdict
from minillm_exercises.session import unavailable

SKIPPED = ("__pycache__", "__MACOSX", ".history", ".ipynb_checkpoints")
FORMULA = ("=", "+", "-", "@", "\t")  # what a spreadsheet would run instead of showing


@dataclass(frozen=True)
class Grades:
    """What one student got for one exercise; `hidden` is None without hidden checks for it."""

    student: str
    exercise: Exercise
    public: Verdict
    hidden: Verdict | None = None

    @property
    def earned(self) -> int:
        """Points of public and hidden checks together."""
        return self.public.earned + (self.hidden.earned if self.hidden else 0)

    @property
    def most(self) -> int:
        """The points that could be earned."""
        return points_of(self.public) + points_of(self.hidden)


def points_of(verdict: Verdict | None) -> int:
    """The points of every check of a verdict, passed or not."""
    return sum(check.points for check in verdict.checks) if verdict else 0


def students(folder: Path) -> list[Path]:
    """The students' folders, by name.

    Raises:
        ExerciseError: the folder does not exist or holds no folders.
    """
    if not folder.is_dir():
        raise ExerciseError(f"There is no folder {str(folder)!r}; give one with a folder each.")
    found = sorted(p for p in folder.iterdir() if p.is_dir() and p.name not in SKIPPED)
    found = [path for path in found if not path.name.startswith(".")]
    if not found:
        raise ExerciseError(
            f"{folder} holds no folders: make one per student, with eNN_topic/eNN_M.py in it."
        )
    return found


def submission(student: Path, exercise: Exercise) -> Path:
    """A student's file of an exercise: at its place, in a copied `work/`, or anywhere below; if
    there is none, the place where it should be."""
    name = f"{exercise.stem}.py"
    usual = student / exercise.folder.name / name
    below = sorted(student.rglob(name), key=lambda path: (len(path.parts), path))
    near = [usual, student / "work" / exercise.folder.name / name, *below]
    real = [p for p in near if p.is_file() and not set(p.parts) & set(SKIPPED)]
    return next(iter(real), usual)


def hidden_checks(folder: Path, manifest: Mapping[str, Exercise]) -> dict[str, Exercise]:
    """The exercises that have a file of hidden checks, each with these checks in place of its own.

    Raises:
        ExerciseError: the folder does not exist, has no such file, or one of no known exercise.
    """
    stems = {exercise.checks.name: exercise for exercise in manifest.values()}
    files = sorted(folder.rglob("test_e*.py")) if folder.is_dir() else []
    if not files:
        raise ExerciseError(f"{str(folder)!r} holds no hidden checks: files such as test_e03_1.py.")
    if unknown := [file.name for file in files if file.name not in stems]:
        raise ExerciseError(f"{unknown[0]} is of no exercise; there are {', '.join(stems)}.")
    found = [(stems[file.name], file.parent) for file in files]
    return {exercise.id: replace(exercise, folder=parent) for exercise, parent in found}


def grade_class(
    folder: Path,
    manifest: Mapping[str, Exercise],
    hidden: Path | None = None,
    seed: int = 0,
    told: Callable[[int, int, str], None] = lambda done, of, what: None,
) -> list[Grades]:
    """Grade every student's file of every exercise that can be graded here. A bad submission
    does not affect the others. `told` gets the number done, how many there are, and the next.

    Raises:
        ExerciseError: the folders are not as described in `students` and `hidden_checks`.
    """
    extra = hidden_checks(hidden, manifest) if hidden else {}
    everybody = students(folder)
    able = [exercise for exercise in manifest.values() if not unavailable(exercise)]
    results: list[Grades] = []
    of = len(able) * len(everybody)
    for exercise in able:
        public = Grader(exercise, seed=seed)
        private = Grader(extra[exercise.id], seed=seed) if exercise.id in extra else None
        for student in everybody:
            told(len(results), of, f"{exercise.id} {student.name}")
            file = submission(student, exercise)
            secret = _judge(private, file, diagnose=False) if private else None
            results.append(Grades(student.name, exercise, _judge(public, file), secret))
    told(of, of, "")
    return results


def _judge(grader: Grader, file: Path, diagnose: bool = True) -> Verdict:
    """The verdict on a file; a failure of the grader is one."""
    try:
        return grader.grade(file, diagnose=diagnose)
    except Exception as error:
        known = isinstance(error, MinillmError)
        said = str(error) if known else f"{type(error).__name__}: {error}"
        message = f"The grader itself failed: {said}"
        return Verdict(grader.exercise.id, "crashed", grader.checks, message)


def as_csv(results: Sequence[Grades]) -> str:
    """One line per student: the total, then points and status of each exercise."""
    ids = list(dict.fromkeys(result.exercise.id for result in results))
    hidden = {result.exercise.id for result in results if result.hidden}
    head = ["student", "total", "max"]
    for name in ids:
        head += [name, f"{name} max", f"{name} status"]
        head += [f"{name} hidden", f"{name} hidden max"] if name in hidden else []
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    for student, own in _by_student(results):
        total = [sum(result.earned for result in own), sum(result.most for result in own)]
        cells = [cell for result in own for cell in _cells(result)]
        writer.writerow([_harmless(student), *total, *cells])
    return out.getvalue()


def _cells(result: Grades) -> list[object]:
    public = result.public
    cells: list[object] = [public.earned, points_of(public), public.status]
    if result.hidden:
        cells += [result.hidden.earned, points_of(result.hidden)]
    return cells


def _by_student(results: Sequence[Grades]) -> Iterator[tuple[str, list[Grades]]]:
    for student in dict.fromkeys(result.student for result in results):
        yield student, [result for result in results if result.student == student]


def _harmless(name: str) -> str:
    """A name that a spreadsheet shows as text."""
    return f"'{name}" if name.startswith(FORMULA) else name


def as_json(results: Sequence[Grades], seed: int) -> dict[str, Any]:
    """Every verdict of every student as plain data."""
    people = [
        {
            "student": student,
            "score": {"earned": sum(r.earned for r in own), "max": sum(r.most for r in own)},
            "exercises": {
                r.exercise.id: {
                    "public": r.public.to_dict(),
                    "hidden": r.hidden.to_dict() if r.hidden else None,
                }
                for r in own
            },
        }
        for student, own in _by_student(results)
    ]
    return {"version": 1, "seed": seed, "students": people}
