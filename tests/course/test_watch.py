"""Watching a file: the watcher alone with keys from a list, and the command at a real terminal."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from minillm_exercises.cli.app import App
from minillm_exercises.cli.tools import watcher_for
from minillm_exercises.watch import keyboard, signature
from tests.course.small import MUTANT, SOLUTION, Terminal, terminal

Step = str | Callable[[], object]


@pytest.fixture
def at(tmp_path: Path) -> Terminal:
    return terminal(tmp_path)


def watched(at: Terminal, *steps: Step, keys: bool = True) -> tuple[bool, str]:
    """Watch e90.1 while `steps` happen, one per wait: keys, or things done to the file."""
    shown: list[str] = []
    happening: Iterator[Step] = iter(steps)

    def wait(seconds: float) -> str:
        step = next(happening, "q")
        if isinstance(step, str):
            return step
        step()
        return ""

    out = App(at.session).out
    with out.capture() as captured:
        watcher = watcher_for(at.exercise(), App(at.session, out))
        passed = watcher.watch(wait, keys)
    shown.append(captured.get())
    return passed, "".join(shown)


def test_a_save_is_graded(at: Terminal) -> None:
    at.write(MUTANT)
    passed, shown = watched(at, "", lambda: at.write(SOLUTION), "")
    assert passed
    assert shown.count("public checks 1/2") == 1
    assert shown.count("public checks 2/2") == 1
    assert shown.endswith("Stopped watching e90.1.\n")
    assert at.session.progress().of("e90.1").attempts == 2


def test_an_editor_that_replaces_the_file(at: Terminal) -> None:
    path = at.write(MUTANT)
    new = path.with_suffix(".swp")

    def replace() -> None:
        new.write_text(path.read_text().replace("abs(a) + abs(b)", "a + b"))
        os.utime(new, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns))
        new.replace(path)

    passed, shown = watched(at, replace, "")
    assert passed
    passed, shown = watched(at, path.unlink, "", "", lambda: path.write_text(SOLUTION), "")
    assert passed
    assert shown.count("public checks") == 2  # not while it was missing
    assert "not begun" not in shown


def test_a_save_during_grading_is_not_lost(at: Terminal) -> None:
    at.write(MUTANT)
    grade = at.session.grade
    saves = [SOLUTION]

    def slow(*args: object, **options: object) -> object:
        verdict = grade(*args, **options)
        if saves:
            at.file().write_text(saves.pop())
        return verdict

    at.session = type(at.session)(at.session.manifest, at.session.workspace, slow)  # type: ignore[arg-type]
    assert watched(at, "")[0]


def test_keys(at: Terminal) -> None:
    at.write(MUTANT)
    _, shown = watched(at, "r", "h", "l", "n", "x")
    assert shown.count("public checks 1/2") == 2
    assert "think of a sum" in shown
    assert "0 of 3 done" in shown
    assert "e90.1 does not pass yet" in shown
    assert "n next" not in shown
    at.write(SOLUTION)
    _, shown = watched(at, "n", "n")
    assert "n next  r again" in shown
    assert "TODO e90.2" in shown  # begun for you
    assert at.file("e90.2").is_file()
    assert "e90.2 does not pass yet" in shown
    assert shown.endswith("Stopped watching e90.2.\n")


def test_the_keys_stay_in_sight(at: Terminal) -> None:
    """The list is longer than a small terminal: what may be pressed is said below it again."""
    at.write(MUTANT)
    for key, text in (("h", "think of a sum"), ("l", "0 of 3 done")):
        _, shown = watched(at, key)
        assert shown.count("q quit") == 2
        assert shown.index(text) < shown.rindex("Watching.  r again  h hint  l list  q quit")
    at.write(SOLUTION)
    assert watched(at, "l")[1].count("n next  r again") == 2


def test_a_file_that_is_gone(at: Terminal) -> None:
    path = at.write(MUTANT)
    text = path.read_text()
    said = "e90_1.py is gone: save it again, or `start e90.1` begins anew.\n"
    _, shown = watched(at, path.unlink, "", "", "")
    assert shown.count(said) == 1
    path.write_text(text)
    _, shown = watched(at, path.unlink, lambda: path.write_text(text), "")
    assert "is gone" not in shown  # an editor replaced it
    again = (path.unlink, "", lambda: path.write_text(text), "")
    assert watched(at, *again, *again)[1].count(said) == 2


def test_nothing_follows_the_last(at: Terminal) -> None:
    at.write("", "e90.2")
    at.session.progress_file.set("e90.2", status="pass")
    at.write(SOLUTION)
    assert "Everything that can be done here is done." in watched(at, "n")[1]


def test_a_watched_exercise_is_begun(at: Terminal) -> None:
    passed, shown = watched(at, keys=False)
    assert not passed
    assert "TODO e90.1" in shown
    assert f"Watching {at.file()}; Ctrl-C stops." in shown.replace("\n", "")


def test_what_a_save_changes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert signature(path) is None
    path.write_text("a")
    first = signature(path)
    assert first == signature(path)
    os.utime(path, ns=(1, 1))
    assert signature(path) != first


def test_no_terminal_means_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", open(os.devnull, encoding="utf-8"))  # noqa: SIM115
    with keyboard() as wait:
        assert wait(0) == ""


COMMAND = [sys.executable, "-m", "minillm_exercises", "watch", "e00.1"]


def _hear_ctrl_c() -> None:
    """A shell lets what it runs in the background ignore Ctrl-C, and that is inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C is sent as a signal")
def test_ctrl_c_ends_with_one_line(tmp_path: Path) -> None:
    watching = subprocess.Popen(
        COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        stdin=subprocess.DEVNULL, env={**os.environ, "MINILLM_WORK": str(tmp_path)},
        preexec_fn=_hear_ctrl_c,
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


@pytest.mark.skipif(os.name == "nt", reason="a terminal of its own needs pty")
def test_keys_at_a_terminal(tmp_path: Path) -> None:
    """A pseudo-terminal: keys work without Enter, and the terminal is as before afterwards."""
    import pty
    import termios

    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    watching = subprocess.Popen(
        COMMAND, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "MINILLM_WORK": str(tmp_path), "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    try:
        assert "q quit" in _until(ours, "q quit")
        os.write(ours, b"\x1b[Hl\x1b[H")  # the Home key ends in H and is no h
        assert "Hint" not in _until(ours, "Next:")
        os.write(ours, b"h")
        said = _until(ours, "Another")
        assert said.count("Hint 1 of 3") == 1
        assert "Hint 2" not in said
        os.write(ours, b"q")
        assert "Stopped watching e00.1." in _until(ours, "Stopped watching e00.1.")
        assert watching.wait(timeout=300) == 1
        assert termios.tcgetattr(theirs) == before
    finally:
        watching.kill()
        watching.wait()
        os.close(ours)
        os.close(theirs)


def _until(terminal: int, text: str) -> str:
    """What a terminal shows until `text` is there."""
    shown = ""
    while text not in shown and select.select([terminal], [], [], 300)[0]:
        shown += os.read(terminal, 4096).decode("utf-8", "replace")
    return shown
