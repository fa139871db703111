"""Starts workers and collects what they find; one that dies or hangs costs one row."""

import json
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from minillm_kernels.bench.results import Result
from minillm_kernels.bench.runner import Clock
from minillm_kernels.bench.worker import CEILINGS, Event, Job

SILENCE = 90.0  # seconds without a word after which a worker counts as hung
GRACE = 30.0  # seconds beyond the budget for the measurement that is running
RESTART = 15.0  # seconds that a new worker needs before it can measure
WORKER = (sys.executable, "-m", "minillm_kernels.bench.worker")
ENDED = "the time budget was used up"


class Worker(Protocol):
    """A process that measures."""

    def next(self, seconds: float) -> Event | None:
        """Its next event, None once it has ended; TimeoutError if it says nothing for so long."""

    def last_words(self) -> str:
        """How it ended."""

    def stop(self) -> None:
        """End it, if it has not."""


class Process:
    """A `Worker` in a process of its own."""

    def __init__(self, job: Job, command: Sequence[str] = WORKER):
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop
        self.process = subprocess.Popen(
            [*command, job.to_json()], stdout=subprocess.PIPE, stderr=self.errors
        )
        self.lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.put(line)
        self.lines.put(None)

    def next(self, seconds: float) -> Event | None:
        """Its next line."""
        try:
            line = self.lines.get(timeout=max(seconds, 0.01))
        except queue.Empty:
            raise TimeoutError from None
        return None if line is None else json.loads(line)

    def last_words(self) -> str:
        """Exit code and last line of what it wrote to standard error."""
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f"the process ended with exit code {code}" + (
            f": {words[-1][:200]}" if words else ""
        )

    def stop(self) -> None:
        """Kill it: a hung kernel listens to nothing gentler."""
        self.process.kill()
        self.process.wait()


@dataclass
class Run:
    """Everything that was found."""

    gpu: Mapping[str, Any] = field(default_factory=dict)
    ceilings: tuple[Result, ...] = ()
    ceilings_at_end: tuple[Result, ...] = ()
    results: list[Result] = field(default_factory=list)
    stopped: str | None = None  # why it ended early


@dataclass
class Supervisor:
    """Runs a job to its end, with as many workers as that takes."""

    job: Job
    start: Callable[[Job], Worker]
    clock: Clock
    say: Callable[[str], None]
    run: Run = field(default_factory=Run)
    names: Sequence[tuple[str, str]] | None = None  # families and names of all measurements
    open: Event | None = None  # what the worker has begun and not finished
    place: int = 0  # the next measurement

    def go(self) -> Run:
        """The run; Ctrl-C ends it with what there is."""
        end = self.clock() + self.job.seconds
        try:
            while self.run.stopped is None and not self._done():
                self._one_worker(end)
        except KeyboardInterrupt:
            self.run.stopped = "interrupted"
        self._leave_out(self.run.stopped or ENDED)
        return self.run

    def _done(self) -> bool:
        return self.names is not None and self.place >= len(self.names)

    def _one_worker(self, end: float) -> None:
        """Until it ends, dies or hangs; `place` is then where the next one goes on."""
        left = end - self.clock()
        first = not self.run.gpu
        if left < RESTART and not first:
            self.run.stopped = ENDED
            return
        job = replace(self.job, start=self.place, seconds=left, first=first)
        self.open, begun = None, False
        worker = self.start(job)
        try:
            while True:
                patience = min(SILENCE, end + GRACE - self.clock())
                event = worker.next(patience)
                if event is None:
                    self._died(worker.last_words(), begun)
                    return
                begun = begun or event["event"] == "begin"
                if event["event"] == "end":
                    self.place = len(self.names or ())
                    return
                self._hear(event)
        except TimeoutError:
            self._died(f"no answer for {patience:.0f} s, so the process was ended", begun)
        finally:
            worker.stop()

    def _hear(self, event: Event) -> None:
        kind = event["event"]
        if kind == "gpu":
            self.run.gpu = event["gpu"]
        elif kind == "plan":
            self.names = event["names"]
        elif kind == "begin":
            self.open = event
            self.say(f"{event['family']}: {event['name']}")
        elif kind == "broken":
            self._record(Result.from_json(event["result"]))
        elif kind == "result":
            self.place = event["index"] + 1
            self._record(Result.from_json(event["result"]))
        else:
            self.open = None
            results = tuple(Result.from_json(data) for data in event["results"])
            if kind == "ceilings":
                self.run.ceilings = results
            else:
                self.run.ceilings_at_end = results

    def _record(self, result: Result) -> None:
        self.open = None
        self.run.results.append(result)
        if result.error:
            self.say(f"{result.family}: {result.name}: {result.error}")

    def _died(self, how: str, begun: bool) -> None:
        """Blame what was running, and go on behind it."""
        if self.open is None:
            if not begun:
                self.run.stopped = how
            return
        event, self.open = self.open, None
        if event["index"] == CEILINGS:
            self.say(f"{event['family']}: {how}")
            return
        self.place = event["index"] + 1
        self._record(Result.unmeasured(event["family"], event["name"], error=how))

    def _leave_out(self, why: str) -> None:
        """A row for everything that no worker came to."""
        everything = [(family, "everything") for family in self.job.families]
        names = everything if self.names is None else self.names
        for family, name in names[self.place :]:
            self.run.results.append(Result.unmeasured(family, name, left_out=why))
