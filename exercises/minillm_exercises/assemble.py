"""Puts the exercises that a learner has passed together into a small engine, in `work/engine/`."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from minillm_exercises.errors import ExerciseError
from minillm_exercises.session import Session
from minillm_exercises.workspace import shown_path, writing

PARTS = ("e03.1", "e06.1", "e07.1", "e09.1")
FIRST = ("e03.1", "e07.1")  # one of them is needed: they hold keys and values


def assemble(session: Session) -> tuple[Path, list[str]]:
    """Copy the passed parts beside `engine.py`; returns its path and what to tell the learner.

    A learner's own `engine.py` stays as it is. A part that is no longer passed is removed.

    Raises:
        ExerciseError: no part that holds keys and values is passed, or the folder cannot be
            written.
    """
    progress = session.progress()
    passed = [name for name in PARTS if progress.of(name).passed and _file(session, name).is_file()]
    if not set(passed) & set(FIRST):
        raise ExerciseError(
            "The engine needs e03.1 (the KV cache of one layer) or e07.1 (blocks), and neither is "
            "passed yet. Begin with: python -m minillm_exercises start e03.1"
        )
    folder = session.workspace.root / "engine"
    target = folder / "engine.py"
    with writing(target):
        folder.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            _copy(_template(session), target)
        for name in PARTS:
            copy = folder / _file(session, name).name
            if name in passed:
                _copy(_file(session, name), copy)
            else:
                copy.unlink(missing_ok=True)
    missing = [f"{name} is not passed yet." for name in PARTS if name not in passed]
    return target, [f"{shown_path(target)} has {', '.join(passed)}.", *missing]


def _copy(source: Path, target: Path) -> None:
    """Copy at once: an interruption leaves no half of a file."""
    part = target.with_suffix(".part")
    shutil.copyfile(source, part)
    part.replace(target)


def run_engine(file: Path, prompts: Sequence[str] = (), capture: bool = False) -> tuple[int, str]:
    """Run the engine; its exit status, and with `capture` what it printed."""
    words = [sys.executable, str(file), *prompts]
    done = subprocess.run(
        words, cwd=file.parent, text=True, check=False,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.STDOUT if capture else None,
    )  # fmt: skip
    return done.returncode, done.stdout or ""


def _file(session: Session, name: str) -> Path:
    return session.workspace.file(session.find(name))


def _template(session: Session) -> Path:
    return session.find(FIRST[0]).folder.parent / "engine" / "engine.py"
