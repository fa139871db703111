"""The grader's side of the process that runs submissions (`server.py`)."""

import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import minillm
from minillm_exercises.child import Job
from minillm_exercises.errors import ExerciseError
from minillm_exercises.limits import DEFAULT, ON_GPU, Limits
from minillm_exercises.manifest import Exercise
from minillm_exercises.server import GRACE

START_SECONDS = 180.0  # importing torch from a cold network disk
PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "SYSTEMROOT", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET", "TRITON_LIBCUDA_PATH", "CC",
)  # fmt: skip


def run_submission(
    exercise: Exercise,
    source: str,
    checks: Sequence[str],
    *,
    seed: int = 0,
    limits: Limits = DEFAULT,
    stop: bool = False,
) -> dict[str, Any]:
    """What `server.supervise` says of `source`, in a process of its own.

    Raises:
        ExerciseError: the checks cannot be imported, or the process that grades has died.
    """
    name = f"{exercise.stem}.py"
    server = _living_server(exercise.needs)
    folder = server.new_folder()
    job = Job(source, name, exercise.checks.resolve(), tuple(checks), folder, seed, limits, stop)
    seconds = (len(checks) + 1) * (max(limits.wall, ON_GPU.wall) + GRACE) + START_SECONDS
    try:
        outcome = server.ask(job, seconds)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if outcome is None:
        raise ExerciseError(
            f"The process that grades {exercise.id} has ended without an answer; grade "
            f"again, and if it happens again run `python -m minillm_exercises doctor`."
        )
    if "error" in outcome:
        raise ExerciseError(
            f"The checks of {exercise.id} cannot be imported ({outcome['error']}): repair "
            f"{exercise.checks.name}, or run `python -m minillm_exercises doctor`."
        )
    return outcome


class Server:
    """The process, which keeps the checks and torch loaded for the submissions to come. It ends
    with the process that started it, because its input then ends."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._turn, self._numbers = threading.Lock(), itertools.count(1)
        self._root = tempfile.mkdtemp(prefix="minillm-grade-")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "minillm_exercises.server"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            cwd=self._root, text=True, encoding="utf-8",
            env={**environment, "HOME": self._root, "TMPDIR": self._root},
        )  # fmt: skip
        weakref.finalize(self, _end, os.getpid(), self.process, self._root)

    def new_folder(self) -> Path:
        """An empty folder for a submission."""
        folder = Path(self._root) / str(next(self._numbers))
        folder.mkdir()
        return folder

    def ask(self, job: Job, seconds: float) -> dict[str, Any] | None:
        """The answer to a job; None if there is none within `seconds`, and then never another."""
        line = ""
        with self._turn:
            alarm = threading.Timer(seconds, self.process.kill)
            alarm.start()
            try:
                self.process.stdin.write(job.to_json() + "\n")  # type: ignore[union-attr]
                self.process.stdin.flush()  # type: ignore[union-attr]
                line = self.process.stdout.readline()  # type: ignore[union-attr]
            except OSError:
                pass
            finally:
                alarm.cancel()
                if not line.endswith("\n"):  # its answer would be taken for that to the next job
                    self.process.kill()
                    self.process.wait()
        return json.loads(line) if line.endswith("\n") else None


def _end(owner: int, process: "subprocess.Popen[str]", root: str) -> None:
    if os.getpid() != owner:  # a fork, which must not end what belongs to its parent
        return
    process.kill()
    process.communicate()
    shutil.rmtree(root, ignore_errors=True)


def _living_server(needs: tuple[str, ...]) -> Server:
    """The server for exercises that need the same: without torch its copies are cheaper, and what
    Triton is imported for is settled when it is imported (`triton_mode`)."""
    key = os.getpid(), frozenset(_environment().items()), needs
    if _server(*key).process.poll() is not None:
        _server.cache_clear()
    return _server(*key)


@lru_cache(maxsize=4)
def _server(
    process_id: int, environment: frozenset[tuple[str, str]], needs: tuple[str, ...]
) -> Server:
    """One for this process, which may itself be a fork, and for an environment."""
    return Server(dict(environment))


@cache
def _paths() -> str:
    package = Path(__file__).resolve().parent
    paths = [str(package.parent), str(Path(minillm.__file__).resolve().parent.parent)]
    kernels = importlib.util.find_spec("minillm_kernels")  # the checks of kernels want it
    paths += [str(Path(kernels.origin).parent.parent)] if kernels and kernels.origin else []
    return os.pathsep.join(paths)


def _environment() -> dict[str, str]:
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return kept | {
        "PYTHONPATH": _paths(),
        "PYTHONHASHSEED": "0",
        "PYTHONIOENCODING": "utf-8",
        "USER": "learner",
        "OMP_NUM_THREADS": "1",  # also: no thread is lost when the process forks
        "MKL_NUM_THREADS": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not spoil the fork
        "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS; torch here uses no Objective-C
    }
