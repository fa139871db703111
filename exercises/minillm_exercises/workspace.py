"""Where a learner's files are: `work/eNN_topic/eNN_M.py`, never overwritten, old ones kept.

The first line of such a file is a *stamp* that names the starter it came from, so that a newer
starter (after `git pull`) is noticed without touching what the learner wrote.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise, exercises_root

STAMP = re.compile(r"# minillm exercise (?P<id>e\d\d\.\d), starter (?P<version>[0-9a-f]{8}):")


def work_root() -> Path:
    """The learner's folder: MINILLM_WORK, else `work/` of the checkout, else `work/` here."""
    if given := os.environ.get("MINILLM_WORK"):
        return Path(given).expanduser()
    root = exercises_root()
    home = root.parent if (root / "exercises.toml").is_file() else Path.cwd()
    return home / "work"


def shown_path(path: Path) -> str:
    """A path as short as it can be typed from here."""
    try:
        return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
    except OSError:  # the current folder was deleted
        return str(path)


def starter_version(text: str) -> str:
    """Eight hexadecimal digits that change with the starter's text (read with any line ends)."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def stamp(exercise: Exercise) -> str:
    """The first line of a learner's file, with its line end."""
    version = starter_version(_read(exercise.starter))
    return (
        f"# minillm exercise {exercise.id}, starter {version}: "
        f"this line lets the grader notice a newer starter\n"
    )


@dataclass(frozen=True)
class Workspace:
    """The learner's folder `root` and the files in it."""

    root: Path

    def file(self, exercise: Exercise) -> Path:
        """The learner's file of an exercise, whether or not it exists."""
        return self.root / exercise.folder.name / f"{exercise.stem}.py"

    def begun(self, exercise: Exercise) -> bool:
        """Whether the learner has the exercise's file."""
        return self.file(exercise).is_file()

    def start(self, exercise: Exercise) -> Path:
        """Copy the starter into the learner's folder; a file that is already there stays as it is.

        Raises:
            ExerciseError: the starter is missing, or the folder cannot be written.
        """
        path = self.file(exercise)
        text = stamp(exercise) + _read(exercise.starter)
        with writing(path), suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
        return path

    def start_beside(self, exercise: Exercise) -> Path:
        """Write the present starter beside the learner's file, as ``e03_1.new.py``.

        Raises:
            ExerciseError: as `start`.
        """
        path = self.file(exercise).with_suffix(".new.py")
        return self.put(path, stamp(exercise) + _read(exercise.starter))

    def put(self, path: Path, text: str) -> Path:
        """Write a file; a version that differs is kept in `.history/` first.

        Raises:
            ExerciseError: the folder cannot be written.
        """
        if path.exists():
            if path.read_text(encoding="utf-8", errors="replace") == text:
                return path
            self.set_aside(path)
        with writing(path):
            path.write_text(text, encoding="utf-8")
        return path

    def set_aside(self, path: Path) -> Path:
        """Move a file into `.history/` under the first free number: ``e03_1.2.py``.

        Raises:
            ExerciseError: the folder cannot be written.
        """
        folder = self.root / ".history"
        number = 1
        while (kept := folder / f"{path.stem}.{number}{path.suffix}").exists():
            number += 1
        with writing(kept):
            path.replace(kept)
        return kept

    def outdated(self, exercise: Exercise) -> bool:
        """Whether the starter has changed since the learner's file was begun (no stamp: no)."""
        try:
            with self.file(exercise).open(encoding="utf-8", errors="replace") as file:
                found = STAMP.match(file.readline())
        except OSError:
            return False
        if not found or not exercise.starter.is_file():
            return False
        return found["version"] != starter_version(_read(exercise.starter))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of `path`, and turn a failure to write there into one sentence."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ExerciseError(
            f"{shown_path(path)} cannot be written ({error.strerror or error}); give the folder "
            f"write permission, or set MINILLM_WORK to another one."
        ) from None


def replace_text(path: Path, text: str) -> None:
    """Write a whole file at once: who reads meanwhile sees the old one."""
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _read(starter: Path) -> str:
    try:
        return starter.read_text(encoding="utf-8")
    except OSError:
        raise ExerciseError(
            f"The starter {starter.parent.name}/{starter.name} is missing; get the course's files "
            f"again (git checkout -- exercises)."
        ) from None
