"""Watching a file: what happens to it between two looks, and the command at a real terminal."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from minillm_exercises.cli.app import App
from minillm_exercises.cli.learn import command_watch
from minillm_exercises.cli.parser import build_parser
from minillm_exercises.watch import signature
from tests.course.small import MUTANT, SOLUTION, Terminal


def nothing() -> None:
    """Happens between two looks."""


def watched(at: Terminal, *steps: Callable[[], object]) -> tuple[bool, str]:
    """Watch e90.1 while `steps` happen, one per wait; then Ctrl-C."""
    happening = iter(steps)

    def wait(seconds: float) -> None:
        step = next(happening, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    app = App(at.session, wait=wait)
    with app.out.capture() as captured:
        code = command_watch(build_parser().parse_args(["watch", "e90.1"]), app)
    return code == 0, captured.get()


def test_a_save_is_graded(at: Terminal) -> None:
    at.write(MUTANT)
    passed, shown = watched(at, nothing, lambda: at.write(SOLUTION), nothing)
    assert passed
    assert shown.count("public checks 1/2") == 1
    assert shown.count("public checks 2/2") == 1
    assert shown.endswith("Stopped watching e90.1.\n")
    assert at.session.progress().of("e90.1").attempts == 2


def test_a_save_during_grading_is_not_lost(at: Terminal) -> None:
    at.write(MUTANT)
    grade = at.session.grade
    saves = [SOLUTION]

    def slow(*args: object, **options: object) -> object:
        verdict = grade(*args, **options)
        if saves:
            at.file().write_text(saves.pop())
        return verdict

    at.session = replace(at.session, grade=slow)  # type: ignore[arg-type]
    assert watched(at, nothing)[0]


def test_a_file_that_is_gone_is_said_once_and_not_graded(at: Terminal) -> None:
    path = at.write(MUTANT)
    said = "e90_1.py is gone: save it again, or `start e90.1` begins anew.\n"
    back = (lambda: path.write_text(SOLUTION), nothing)
    passed, shown = watched(at, path.unlink, nothing, nothing, nothing, *back)
    assert (passed, shown.count(said), shown.count("public checks")) == (True, 1, 2)
    assert "is gone" not in watched(at, path.unlink, *back)[1]  # an editor replaced it
    assert watched(at, *2 * (path.unlink, nothing, *back))[1].count(said) == 2


def test_what_a_save_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert signature(path) is None
    path.write_text("a")
    first = signature(path)
    assert first == signature(path)
    os.utime(path, ns=(1, 1))
    assert signature(path) != first


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    """A shell lets what it runs in the background ignore Ctrl-C, and that is inherited."""
    watching = subprocess.Popen(
        [sys.executable, "-m", "minillm_exercises", "watch", "e00.1"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL, env={**os.environ, "MINILLM_WORK": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert watching.stdout is not None
    for line in watching.stdout:
        if line.startswith("Watching "):
            break
    watching.send_signal(signal.SIGINT)
    out, error = watching.communicate(timeout=300)
    assert out.splitlines()[-1] == "Stopped watching e00.1."
    assert error == ""
    assert watching.returncode == 1
