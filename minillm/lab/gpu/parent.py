"""Runs stages in worker processes, and writes what they say at once.

A worker says lines of JSON on standard output: its plan, what it begins, and what came of it.
Everything else that it prints goes to the log, up to a limit. A worker that is silent for too long,
or that outlives its stage, is killed with all its children; the case that it was at is recorded,
and a new worker goes on behind it. Results are in memory, too, so that a full disk loses none.
"""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minillm.lab.gpu.stages import Stage

Record = dict[str, Any]
LOG_BYTES = 1_500_000  # of what the workers of a stage print
LINE_BYTES = 1 << 20  # of one event
START = 60.0  # seconds that a worker may take until its plan, which needs torch and a GPU
BEHIND = 2.0  # seconds left below which no new worker is started


class Results:
    """The files of a run: a line of JSON for each case, and what the workers printed."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self.folder, self.clock, self.began = folder, clock, clock()
        self.records: list[Record] = []
        self.lost = ""  # why a file could not be written
        self._printed: dict[str, int] = {}
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("results.jsonl", "log.txt"):
            (folder / name).write_bytes(b"")

    def add(self, stage: str, task: str, **more: Any) -> Record:
        """Append a record, and flush it."""
        record = {"stage": stage, "task": task, **more}
        record["at"] = round(self.clock() - self.began, 2)
        with self._lock:
            self.records.append(record)
            self._append("results.jsonl", json.dumps(record).encode() + b"\n")
        return record

    def log(self, stage: str, task: str, data: bytes) -> None:
        """Append what a worker printed, up to `LOG_BYTES` of a stage."""
        data = f"[{stage} {task}] ".encode() + data
        with self._lock:
            before = self._printed.get(stage, 0)
            self._printed[stage] = before + len(data)
            if before < LOG_BYTES:
                more = b"\n[more was printed and left out]\n" * (before + len(data) > LOG_BYTES)
                self._append("log.txt", data[: LOG_BYTES - before] + more)

    def _append(self, name: str, data: bytes) -> None:
        try:
            with open(self.folder / name, "ab") as file:
                file.write(data)
                file.flush()
        except OSError as error:
            self.lost = self.lost or f"{name}: {error}"

    def replace(self, name: str, text: str) -> None:
        """Write a whole file atomically; the old one stays if that fails."""
        part = self.folder / f".{name}.part"
        try:
            part.write_text(text, "utf-8")
            part.replace(self.folder / name)
        except OSError as error:
            self.lost = self.lost or f"{name}: {error}"
            with suppress(OSError):
                part.unlink()


class Worker:
    """A process group, the events it says, and the end of what it printed."""

    def __init__(self, command: Sequence[str], told: Callable[[bytes], None]):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        self.lines: queue.Queue[bytes | None] = queue.Queue(maxsize=50)
        self.last, self._told, self._ended = b"", told, threading.Event()
        threading.Thread(target=self._read, daemon=True).start()
        self._drained = threading.Thread(target=self._drain, daemon=True)
        self._drained.start()

    def _read(self) -> None:
        stream: Any = self.process.stdout
        while line := stream.readline(LINE_BYTES):
            while not self._ended.is_set():
                with suppress(queue.Full):
                    self.lines.put(line, timeout=0.2)
                    break
        self.lines.put(None)

    def _drain(self) -> None:
        stream: Any = self.process.stderr
        while data := stream.read1(65536):
            self.last = (self.last + data)[-2000:]
            self._told(data)

    def next(self, seconds: float) -> Record | None:
        """The next event, None at the end; TimeoutError if there is none for so long."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.001))
            except queue.Empty:
                raise TimeoutError from None
            if line is None:
                return None
            with suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and "event" in event:
                    return event
            self._told(line)  # something else that was printed: no sign of life
            if time.monotonic() > end:
                raise TimeoutError

    def stop(self) -> None:
        """Kill the group, and wait for the process for a short time only: a process that hangs in
        the driver may not die."""
        self._ended.set()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)

    def how(self) -> str:
        """How it ended, with the last line that it printed."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=5)
        self._drained.join(timeout=1)  # not longer: a child of the worker may hold the pipe open
        words = [line.strip() for line in self.last.decode(errors="replace").split("\n")]
        said = next((word for word in reversed(words) if word), "")
        code = f"the worker ended with code {self.process.returncode}"
        return f"{code}: {said[:300]}" if said else code


@dataclass
class _Task:
    """Where a task is: its cases, the next one, and the one that is open."""

    names: list[str] | None = None
    place: int = 0
    open: int | None = None
    patience: float = START
    since: float = 0.0


@dataclass
class Parent:
    """Runs stages.

    Args:
        command: of the worker for (stage, task, first case, seconds), without the stage's prefix.
        say: shows progress.
    """

    results: Results
    command: Callable[[Stage, str, int, float], Sequence[str]]
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    stopped: threading.Event = field(default_factory=threading.Event)
    _workers: set[Worker] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, stage: Stage, end: float | None = None) -> None:
        """All tasks of a stage, until its cap or `end`. Tasks that run one after another have equal
        shares of the time that is left."""
        end = self.clock() + stage.cap if end is None else end
        left = list(stage.tasks)

        def serve() -> None:
            while True:
                with self._lock:
                    if not left:
                        return
                    now, share = self.clock(), len(left) if stage.parallel == 1 else 1
                    task = left.pop(0)
                self._run_task(stage, task, now + (end - now) / share)

        count = min(stage.parallel, len(left))
        threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        """End all workers; `run` then returns soon. Safe in a signal handler."""
        self.stopped.set()
        for worker in list(self._workers):
            worker.stop()

    def _run_task(self, stage: Stage, task: str, end: float) -> None:
        at, said = _Task(), False
        while not self.stopped.is_set() and end - self.clock() > BEHIND:
            before, why = at.place, self._one_worker(stage, task, at, end)
            if not why:
                said = True
                break
            status, reason = why
            if at.open is not None and at.names is not None:
                self._close(stage, task, at, status, error=reason)
            elif at.place == before:  # it did nothing: the next one would not, either
                self.results.add(stage.name, task, case="", status=status, error=reason)
                said = True
                break
        for name in (at.names or [])[at.place :]:
            self.results.add(stage.name, task, case=name, status="not reached")
        if at.names is None and not said:
            self.results.add(stage.name, task, case="", status="not reached")

    def _one_worker(self, stage: Stage, task: str, at: _Task, end: float) -> tuple[str, str] | None:
        """Until it ends. Returns the status of the open case and the reason; None at the end."""
        command = [*stage.prefix, *self.command(stage, task, at.place, end - self.clock())]
        try:
            worker = Worker(command, lambda data: self.results.log(stage.name, task, data))
        except OSError as error:
            return "error", f"{command[0]} cannot be started: {error}"
        self._workers.add(worker)
        at.open, at.patience = None, max(START, stage.silence)
        try:
            while (event := worker.next(min(at.patience, end - self.clock()))) is not None:
                if event["event"] == "end":
                    self._last_word(stage, task, worker)
                    return None
                self._hear(stage, task, at, event)
            return ("stopped" if self.stopped.is_set() else "crashed"), worker.how()
        except TimeoutError:
            if self.clock() >= end - 0.1:
                return "timeout", "the stage's time was over"
            return "hung", f"no word for {at.patience:g} s, so the worker was ended"
        finally:
            worker.stop()
            self._workers.discard(worker)

    def _last_word(self, stage: Stage, task: str, worker: Worker) -> None:
        """What the program before the worker's command found, by its exit code: the worker does not
        know it."""
        if stage.prefix:
            with suppress(TimeoutError):
                worker.next(10.0)  # what it prints goes to the log
            reason = worker.how()
            if worker.process.returncode:
                self.results.add(stage.name, task, case="", status="failed", error=reason)
                self.say(f"{stage.name} {task}: {reason}")

    def _hear(self, stage: Stage, task: str, at: _Task, event: Record) -> None:
        kind = event["event"]
        at.patience = stage.silence
        if kind == "plan":
            if at.names is None:
                self.results.add(stage.name, task, plan=event["names"])
            at.names = list(event["names"])
        elif kind == "begin":
            at.open, at.since = event["index"], self.clock()
            at.patience = max(stage.silence, event.get("patience", 0.0))
        elif kind == "done" and at.names is not None and at.open is not None:
            self._close(stage, task, at, event["status"], **event["found"])

    def _close(self, stage: Stage, task: str, at: _Task, status: str, **found: Any) -> None:
        """Record the open case, and go on behind it."""
        names, index = at.names or [], at.open or 0
        name = names[index] if index < len(names) else str(index)
        seconds = round(self.clock() - at.since, 3)
        self.results.add(stage.name, task, case=name, status=status, seconds=seconds, **found)
        if status != "passed":
            self.say(f"{stage.name} {task}: {name}: {status}: {str(found.get('error'))[:200]}")
        at.place, at.open = index + 1, None


def read(file: Path) -> list[Record]:
    """The records of results.jsonl, also of one whose last line was cut."""
    found = []
    for line in file.read_text("utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and "stage" in record:
                found.append(record)
    return found
