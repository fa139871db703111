"""Runs an engine in a separate process, with one JSON line per request (see peers/protocol.py)."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from minillm.errors import MinillmError

PACKAGE = Path(__file__).resolve().parent
ROOT = PACKAGE.parents[2]
RUN = PACKAGE / "peers" / "run.py"
OWN = "minillm"
PEERS = ("transformers", "vllm", "openvino", "llamacpp")
QUANTISED_PEERS = ("openvino", "llamacpp")  # with --quantization
END_SECONDS = 5.0  # time for a process to exit by itself


class EngineFailedError(MinillmError, RuntimeError):
    """An engine gave no valid answer, or reported an error."""


class MissingPeerError(EngineFailedError):
    """An engine's environment is not installed."""


def python_of(name: str, root: Path = ROOT) -> str:
    """The interpreter of an engine's environment; raises MissingPeerError if there is none.

    transformers is part of the development environment and uses the current interpreter.
    """
    if name == OWN or (name == "transformers" and find_spec(name)):
        return sys.executable
    folder = Path(os.environ.get("MINILLM_PEERS") or root / ".peers")
    for place in ("bin/python", "Scripts/python.exe"):
        if (folder / name / place).exists():
            return str(folder / name / place)
    raise MissingPeerError(f"{name} is skipped: it is not installed; run 'make peers'.")


def environment(name: str, threads: int) -> dict[str, str]:
    """Environment variables of every engine's process: number of threads, offline hub."""
    variables = dict(os.environ) | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    variables.pop("PYTHONPATH", None)
    if name == OWN:
        variables["PYTHONPATH"] = str(ROOT)
    return variables


class EngineProcess:
    """An engine's process; `ask` ends the process and raises EngineFailedError on any failure."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        timeout: float = 600.0,
    ):
        self.name, self.log, self.timeout = name, log, timeout
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(variables),
                process_group=0,
            )
        self._lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    @classmethod
    def start(cls, name: str, threads: int, log: Path, timeout: float) -> "EngineProcess":
        """Start the engine `name` in its own environment."""
        command = [python_of(name), str(RUN), name]
        return cls(name, command, environment(name, threads), log, timeout)

    @property
    def group(self) -> int:
        """The process group of the engine and its children."""
        return self._process.pid

    def _read(self) -> None:
        stream = self._process.stdout
        for line in stream or ():
            self._lines.put(line)
        self._lines.put(b"")  # the end

    def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request, and return the answer."""
        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            raise self._failed("has ended")
        with suppress(OSError):  # the process has ended; it may have written an answer before
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
        try:
            line = self._lines.get(timeout=self.timeout)
        except queue.Empty:
            raise self._failed(f"gave no answer within {self.timeout:g} s") from None
        if not line:
            raise self._failed("has ended")
        try:
            answer = json.loads(line)
            if "ok" in answer:
                return answer["ok"]
            error = str(answer["error"])
        except (ValueError, TypeError, KeyError):
            shown = line[:60].decode(errors="replace").strip()
            raise self._failed(f"answered {shown!r}, which is not valid") from None
        raise self._failed(f"failed: {error}", read_log=False)

    def _failed(self, what: str, read_log: bool = True) -> EngineFailedError:
        """End the process, and return the error with the last line of its log."""
        self.close(patient=False)
        said = last_line(self.log) if read_log else ""
        tail = f"; last line of its log: {said}" if said else ""
        return EngineFailedError(f"{self.name} {what}{tail} (log: {self.log}).")

    def close(self, patient: bool = True) -> None:
        """End the process and its children. May be called twice."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if patient:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        end_group(self._process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and its process group."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def last_line(log: Path) -> str:
    """The last non-empty line of a log; empty if there is none."""
    try:
        lines = log.read_text("utf-8", errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
