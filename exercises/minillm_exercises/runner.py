"""The grader's side of the process that runs submissions (`server.py`)."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import minillm
from minillm_exercises.child import Job
from minillm_exercises.errors import ExerciseError
from minillm_exercises.limits import DEFAULT, ON_GPU, Limits
from minillm_exercises.manifest import Exercise
from minillm_exercises.server import GRACE
from minillm_exercises.warm import SECONDS as START_SECONDS
from minillm_exercises.warm import Forked, forked

Server = subprocess.Popen[str] | Forked

PASSED_ON = (
    "PATH", "LANG", "LC_ALL", "SYSTEMROOT", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES",
    "TRITON_INTERPRET", "TRITON_LIBCUDA_PATH", "CC",
)  # fmt: skip


class Runner:
    """Runs submissions of one exercise, each in a process of its own; close it after use.

    It starts with the first submission, so that a file the guard refuses costs nothing.
    """

    def __init__(self, exercise: Exercise) -> None:
        self._exercise = exercise
        self._server: Server | None = None
        self._folder = tempfile.TemporaryDirectory(
            prefix="minillm-grade-", ignore_cleanup_errors=True
        )
        self._jobs = 0

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove its folder; more than once does no harm."""
        if self._server is not None:
            for pipe in (self._server.stdin, self._server.stdout):
                if pipe is not None:
                    pipe.close()
            self._server.kill()
            self._server.wait()
            self._server = None
        self._folder.cleanup()

    def run(
        self,
        source: str,
        checks: Sequence[str],
        *,
        seed: int = 0,
        limits: Limits = DEFAULT,
        stop: bool = False,
    ) -> dict[str, Any]:
        """What `server.supervise` says of `source`.

        Raises:
            ExerciseError: the checks cannot be imported, or the process that grades has died.
        """
        server = self._server or self._start()
        self._jobs += 1
        folder = Path(self._folder.name) / str(self._jobs)
        folder.mkdir()
        name = f"{self._exercise.stem}.py"
        job = Job(source, name, tuple(checks), folder, seed, limits, stop)
        wall = max(limits.wall, ON_GPU.wall)
        seconds = (len(checks) + 1) * (wall + GRACE) + START_SECONDS
        if server.stdin is None:
            raise ExerciseError("The process that grades has no input.")
        try:
            server.stdin.write(job.to_json() + "\n")
            server.stdin.flush()
        except OSError:
            raise self._died() from None
        return self._answer(server, seconds)

    def _start(self) -> Server:
        package = Path(__file__).resolve().parent
        paths = [str(package.parent), str(Path(minillm.__file__).resolve().parent.parent)]
        kernels = importlib.util.find_spec("minillm_kernels")  # the checks of kernels want it
        paths += [str(Path(kernels.origin).parent.parent)] if kernels and kernels.origin else []
        kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        environment = kept | {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONHASHSEED": "0",
            "PYTHONIOENCODING": "utf-8",
            "USER": "learner",
            "OMP_NUM_THREADS": "1",  # also: no thread is lost when the process forks
            "MKL_NUM_THREADS": "1",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not spoil the fork
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",  # macOS; torch here uses no Objective-C
        }
        checks, folder = self._exercise.checks, self._folder.name
        if "torch" in self._exercise.needs:
            self._server = forked(environment, folder, checks)
        self._server = self._server or subprocess.Popen(
            [sys.executable, "-P", "-m", "minillm_exercises.server", str(checks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment | {"HOME": folder, "TMPDIR": folder},
            text=True,
            encoding="utf-8",
        )
        ready = self._answer(self._server, START_SECONDS)
        if "error" in ready:
            raise ExerciseError(
                f"The checks of {self._exercise.id} cannot be imported ({ready['error']}): repair "
                f"{self._exercise.checks.name}, or run `python -m minillm_exercises doctor`."
            )
        return self._server

    def _answer(self, server: Server, seconds: float) -> dict[str, Any]:
        alarm = threading.Timer(seconds, server.kill)
        alarm.start()
        try:
            line = server.stdout.readline() if server.stdout else ""
        finally:
            alarm.cancel()
        if not line:
            raise self._died()
        return json.loads(line)

    def _died(self) -> ExerciseError:
        return ExerciseError(
            f"The process that grades {self._exercise.id} has ended without an answer; grade "
            f"again, and if it happens again run `python -m minillm_exercises doctor`."
        )
