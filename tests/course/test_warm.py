"""Servers forked from the process that has torch loaded: they begin as a new interpreter does, and
the process does not outlive the one that started it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from minillm_exercises import runner
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise
from minillm_exercises.runner import Runner
from tests.course.conftest import TOY, ToyRoot

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a new interpreter each time")
TELL = """
import json, os, signal, sys, tempfile

raise ImportError(json.dumps({
    "arguments": sys.argv, "environment": dict(os.environ), "folder": os.getcwd(),
    "temporary": tempfile.mkdtemp(), "main": sys.modules["__main__"].__file__,
    "files": sorted(map(int, os.listdir("/proc/self/fd"))), "path": sys.path,
    "signals": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGCHLD, signal.SIGPROF)],
    "coding": [sys.stdin.encoding, sys.flags.safe_path, sys.flags.hash_randomization],
    "parent": os.getppid(),
}))
"""


def told(exercise: Exercise) -> tuple[dict[str, object], int]:
    """What a server says of itself, its folders aside; and who its parent is."""
    with Runner(exercise) as begun:
        folder = begun._folder.name
        with pytest.raises(ExerciseError) as error:
            begun.run("", ())
    text = str(error.value).partition("ImportError: ")[2].rpartition("): repair ")[0]
    said = json.loads(text.replace(folder, "OWN"))
    said["temporary"] = str(Path(said["temporary"]).parent)
    return said, said.pop("parent")


def test_a_server_begins_as_in_a_new_interpreter(
    toy_root: ToyRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_root.write("e91_softmax/test_e91_1.py", TELL)
    exercise = toy_root.manifest["e91.1"]
    first, parent = told(exercise)
    again, same = told(exercise)
    assert parent == same != os.getpid()
    monkeypatch.setattr(runner, "forked", lambda *_: None)
    new, ours = told(exercise)
    assert first == again == new
    assert ours == os.getpid()
    assert first["folder"] == first["temporary"] == "OWN"


def test_other_settings_have_a_process_of_their_own(
    toy_root: ToyRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy_root.write("e91_softmax/test_e91_1.py", TELL)
    _, parent = told(toy_root.manifest["e91.1"])
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    said, other = told(toy_root.manifest["e91.1"])
    assert said["environment"]["LC_ALL"] == "C.UTF-8"
    assert other != parent


ALONE = f"""
import os, signal
from dataclasses import replace
from pathlib import Path
from minillm_exercises import warm
from minillm_exercises.grader import Grader
from minillm_exercises.manifest import load_manifest

exercise = replace(load_manifest(Path({str(TOY)!r}))["e90.1"], needs=("torch",))
text = (exercise.answers / "solution.py").read_text("utf-8")
started, make = [], warm.Warm.__init__

def noted(self, environment):
    started.append(self)
    make(self, environment)

def grade():
    with Grader(exercise) as grader:
        status, server = grader.run(text).status, grader._runner._server
        print(status, len(started), type(server).__name__, started[-1].process.pid, flush=True)

warm.Warm.__init__ = noted
grade()
os.kill(started[0].process.pid, signal.SIGINT)  # as Jupyter does: it interrupts a whole group
grade()
os.kill(started[0].process.pid, signal.SIGKILL)
grade()
grade()
if child := os.fork():
    os.waitpid(child, 0)
else:
    grade()
    os._exit(0)
server = warm.forked(dict(os.environ), os.getcwd(), exercise.checks)
print(server.stdout.readline()[:9], len(started), server._id, started[-1].process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(process_id: int) -> bool:
    """Whether a process has ended, or does so in a while."""
    stat = Path(f"/proc/{process_id}/stat")
    for _ in range(3000):
        if not stat.exists() or stat.read_text("ascii").rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_warm_process_is_replaced_and_ends_with_the_one_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    said = [line.split() for line in done.stdout.splitlines()]
    assert [line[:3] for line in said[:5]] == [
        ["pass", "1", "Forked"],
        ["pass", "1", "Forked"],  # an interrupt does not end it
        ["pass", "1", "Popen"],  # it was killed
        ["pass", "2", "Forked"],
        ["pass", "3", "Forked"],  # in a fork, which must not talk to the same process
    ]
    assert said[5][0] == '{"checks"'
    assert all(gone(int(line[-1])) for line in said)
    assert gone(int(said[5][2]))
