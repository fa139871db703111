"""A process that has torch and checks loaded, and runs one submission after another in copies.

``python -m minillm_exercises.server`` reads one job per line and answers with one line. Each job
runs in a fork of this process, which takes milliseconds where importing torch takes seconds; where
there is no fork, it runs in a new process. This process never runs code of a submission.
"""

import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import secrets
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from minillm_exercises.checking import Check
from minillm_exercises.child import MAX_PRINTED, Job, run_job
from minillm_exercises.limits import ON_GPU, processor_time

MAX_REPORT = 64 * 2**20
METHOD = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
GRACE = 2.0  # seconds for what a process has to do by itself before it is killed
PAUSE = 0.002  # seconds between two looks at it


def load_checks(path: Path) -> dict[str, Check]:
    """The functions of a file of checks that are marked as checks, by name."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(folder)
        for name, beside in list(sys.modules.items()):  # another folder may have one of that name
            if (getattr(beside, "__file__", None) or "").startswith(folder + os.sep):
                del sys.modules[name]
    return {name: value for name, value in vars(module).items() if hasattr(value, "check_info")}


def supervise(job: Job, loaded: Mapping[str, Check], method: str = METHOD) -> dict[str, Any]:
    """Run a job in a process of its own and return its reports and how it ended."""
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    word = secrets.token_hex(16).encode()  # in front of the reports of this process
    target = (
        functools.partial(run_job, sender, word, job, loaded)
        if method == "fork"
        else functools.partial(_run_afresh, sender, word, job)
    )
    process = context.Process(target=target)
    process.start()
    sender.close()
    reports = _receive(receiver, word, job, process.pid)
    if reports and reports[-1]["event"] == "silent":
        _ask_where(process, job)
    _end(process)
    if hasattr(signal, "SIGXCPU") and process.exitcode == -signal.SIGXCPU:
        reports.append({"event": "timeout", "check": _running(reports), "kind": "operation"})
    return {
        "limits": vars(job.limits), "reports": reports, "exit": process.exitcode,
        "fault": _fault_line(job), "printed": _read(job.printed, MAX_PRINTED),
    }  # fmt: skip


def _run_afresh(channel: Connection, word: bytes, job: Job) -> None:
    run_job(channel, word, job, load_checks(job.file_of_checks))


def _receive(receiver: Connection, word: bytes, job: Job, process_id: int) -> list[dict[str, Any]]:
    """The reports until the process ends; the last is "silent" if it fell silent before."""
    reports: list[dict[str, Any]] = []
    while not reports or reports[-1]["event"] not in ("end", "crash", "timeout"):
        if not _comes(receiver, process_id, job.limits.wall):
            kind = "wait" if hasattr(signal, "setitimer") else "silent"
            reports.append({"event": "silent", "check": _running(reports), "kind": kind})
            break
        try:
            message = receiver.recv_bytes(MAX_REPORT)
        except (EOFError, OSError):
            break
        if message.startswith(word):
            reports.append(json.loads(message[len(word) :]))
    return reports


def _comes(receiver: Connection, process_id: int, wall: float) -> bool:
    """Whether there is a report, or the process has ended. It may take any time on the clock, as
    long as the process computes: that ends by itself, when its processor time is used up."""
    before = processor_time(process_id)
    while not receiver.poll(wall):
        now = processor_time(process_id)
        if before is None or now is None or now - before < 0.01 * wall:
            return False
        before = now
    return True


def _running(reports: list[dict[str, Any]]) -> str:
    return reports[-1]["check"] if reports else "loading"


def _ask_where(process: Any, job: Job) -> None:
    """Let Python write down the line it is at, which it can do inside one long operation."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
        for _ in range(int(GRACE / PAUSE)):
            if _fault_line(job):
                break
            time.sleep(PAUSE)
    process.kill()


def _end(process: Any) -> None:
    """Wait for the process, which is ending by itself unless it closed the pipe and goes on."""
    for _ in range(int(GRACE / PAUSE)):
        if process.exitcode is not None:
            break
        time.sleep(PAUSE)
    if hasattr(os, "killpg"):
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
    process.kill()
    process.join()


def _fault_line(job: Job) -> int:
    """The deepest line of the submission in what Python wrote down at a signal; 0 if none."""
    pattern = rf'File "{re.escape(str(job.file))}", line (\d+) in'
    found = re.search(pattern, _read(job.fault, MAX_PRINTED))
    return int(found[1]) if found else 0


def _read(path: Path, most: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""


def serve() -> None:
    """Answer jobs until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a check prints while it is imported is no answer
    known: dict[Path, tuple[bytes, Mapping[str, Check]]] = {}
    for line in sys.stdin:
        answers.write(json.dumps(_answer(Job.from_json(line), known)) + "\n")
        answers.flush()


def _answer(job: Job, known: dict[Path, tuple[bytes, Mapping[str, Check]]]) -> dict[str, Any]:
    """What came of a job; the checks of `known` need not be loaded, unless they have changed."""
    path = job.file_of_checks
    try:
        text = path.read_bytes()
        if path not in known or known[path][0] != text:
            known[path] = text, load_checks(path)
    except BaseException as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return supervise(replace(job, limits=ON_GPU) if _on_gpu() else job, known[path][1])


def _on_gpu() -> bool:
    """Whether the checks launch compiled kernels (`triton_mode`), which have other limits."""
    mode = sys.modules.get("minillm_exercises.triton_mode")
    return mode is not None and not mode.INTERPRETED


if __name__ == "__main__":
    serve()
