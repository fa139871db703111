"""The process in which a submission runs: it loads the file, runs checks, and reports each at once.

Reports go through a pipe, each behind a random word that was drawn for this process alone, so that
nothing the submission prints can be taken for one. A report leaves when its check ends: whatever
happens later, that check was graded.
"""

import faulthandler
import functools
import io
import json
import os
import re
import signal
import sys
import time
import types
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import SourceFileLoader
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from minillm_exercises.checking import Check, CheckFailedError, Trace, describe, run_traced
from minillm_exercises.limits import DEFAULT, Limits, on_alarm, restrict, set_alarm

MAX_PRINTED = 64 * 1024
MAX_VALUES = 512
MAX_OBSERVED = 2000
MAX_SHOWN = 160  # characters of local variables
LOADING = "loading"  # the name of what runs before the first check

Report = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One submission to run: its text, the checks wanted in order, and an empty folder for it.

    `stop` ends the run at the first check that does not pass.
    """

    source: str
    name: str  # "e03_1.py", which is how the submission sees itself
    file_of_checks: Path
    checks: tuple[str, ...]
    folder: Path
    seed: int = 0
    limits: Limits = DEFAULT
    stop: bool = False

    @property
    def file(self) -> Path:
        """The copy that is run; the submission may change it without harm."""
        return self.folder / self.name

    @property
    def printed(self) -> Path:
        """Where the first kilobytes go that the submission prints."""
        return self.folder / "printed"

    @property
    def fault(self) -> Path:
        """Where Python writes the lines it was at when a signal stops it."""
        return self.folder / "fault"

    def to_json(self) -> str:
        """The job as one line."""
        return json.dumps({**vars(self), "limits": vars(self.limits)}, default=str)

    @classmethod
    def from_json(cls, line: str) -> "Job":
        """The job of a line of `to_json`."""
        job = cls(**json.loads(line))
        return replace(
            job,
            file_of_checks=Path(job.file_of_checks),
            checks=tuple(job.checks),
            folder=Path(job.folder),
            limits=Limits(**job.limits),  # type: ignore[arg-type]
        )


class _Printed(io.TextIOBase):
    """Standard output of a submission: the first kilobytes are kept, the rest costs nothing."""

    def __init__(self, path: Path) -> None:
        self._left = MAX_PRINTED
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._left > 0:
            data = text[: self._left].encode("utf-8", "replace")
            self._left -= len(data)
            os.write(self.file, data)
        return len(text)


class _Reporter:
    """The learner's process' end of the pipe; knows which check is running."""

    def __init__(self, channel: Connection, word: bytes, file: Path) -> None:
        self._channel, self._word, self._file = channel, word, str(file)
        self.running = LOADING

    def send(self, event: str, **details: Any) -> None:
        record = json.dumps({"event": event, "check": self.running, **details})
        self._channel.send_bytes(self._word + record.encode())

    def out_of_time(self, signum: int, frame: FrameType | None) -> None:
        """Ends the process: an exception here could be caught by the submission."""
        while frame is not None and frame.f_code.co_filename != self._file:
            frame = frame.f_back
        line = frame.f_lineno if frame else 0

        def finish(values: str) -> NoReturn:
            self.send("timeout", kind="loop", line=line, values=values)
            os._exit(0)

        signal.signal(signal.SIGPROF, lambda *_: finish(""))
        signal.setitimer(signal.ITIMER_PROF, 0.5)  # a __repr__ may take as long as the loop
        finish(_values_unseen(frame))

    def give_up(self, error: BaseException, kind: str) -> NoReturn:
        """Report what ended the process, and end it."""
        line, _ = learner_frame(error.__traceback__, self._file)
        self.send("crash", kind=kind, line=line, message=text_of(error))
        os._exit(0)


def run_job(channel: Connection, word: bytes, job: Job, checks: Mapping[str, Check]) -> NoReturn:
    """Run `job` in this process, which ends here."""
    reporter = _Reporter(channel, word, job.file)
    try:
        _isolate(channel, job)
        on_alarm(reporter.out_of_time)
        set_alarm(job.limits)
        impl = _load(reporter, job)
        if impl is not None:
            _run_checks(reporter, job, checks, impl)
        reporter.send("end")
    finally:
        os._exit(0)


def _isolate(channel: Connection, job: Job) -> None:
    """Leave the submission a folder of its own, no input, no other file, and bounded memory."""
    if hasattr(os, "setsid"):
        os.setsid()  # so that processes it starts end with it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    job.file.write_text(job.source, encoding="utf-8")
    printed = _Printed(job.printed)
    fault = job.fault.open("w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    if os.name == "posix":  # on Windows a channel is no descriptor, and nothing was inherited
        keep = sorted({0, 1, 2, channel.fileno(), printed.file, fault.fileno()})
        for low, high in zip(keep, [*keep[1:], 1024], strict=True):
            os.closerange(low + 1, high)
    sys.stdin = os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.stderr = sys.__stdout__ = sys.__stderr__ = printed  # type: ignore[misc, assignment]
    faulthandler.enable(fault)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, fault)
        faulthandler.register(signal.SIGXCPU, fault, all_threads=False, chain=True)  # then it ends
    job.folder.joinpath("cwd").mkdir()
    os.chdir(job.folder / "cwd")
    os.environ["MINILLM_GRADE_SEED"] = str(job.seed)
    restrict(job.limits)


def _load(reporter: _Reporter, job: Job) -> types.ModuleType | None:
    """The submission as a module, or None after a report of why not."""
    loader = SourceFileLoader(job.file.stem, str(job.file))
    module = types.ModuleType(loader.name)
    module.__file__, module.__loader__ = loader.path, loader
    sys.modules[module.__name__] = module  # dataclasses look their module up
    result = _attempt(reporter, job, functools.partial(loader.exec_module, module))
    if result["status"] == "pass":
        return module
    reporter.send("unloadable", **result)
    return None


def _run_checks(
    reporter: _Reporter, job: Job, checks: Mapping[str, Check], impl: types.ModuleType
) -> None:
    for name in job.checks:
        reporter.running = name
        reporter.send("start")
        set_alarm(job.limits)
        start = time.perf_counter()
        result = _attempt(reporter, job, functools.partial(run_traced, checks[name], impl))
        reporter.send("result", seconds=time.perf_counter() - start, **result)
        if job.stop and result["status"] != "pass":
            return


def _attempt(reporter: _Reporter, job: Job, run: Callable[[], Trace | None]) -> Report:
    """Run something of the submission; what it raised, as a report."""
    try:
        trace = run()
        if trace is not None and not trace.seen:
            return {"status": "vacuous"}
        return {"status": "pass", "trace": compact_trace(trace)}
    except BaseException as error:
        if isinstance(error, SystemExit):
            reporter.give_up(error, "exit")
        if isinstance(error, MemoryError) or "can't allocate memory" in text_of(error):
            reporter.give_up(error, "memory")
        if _lost_gpu(error):
            reporter.give_up(error, "gpu")
        line, frame = learner_frame(error.__traceback__, str(job.file))
        report = {
            "status": _status(error, line), "type": type(error).__name__, "message": text_of(error),
            "line": line, "values": values_of(frame),
            "trace": compact_trace(getattr(error, "trace", None)),
        }  # fmt: skip
        error.__traceback__ = None  # frees what the frames hold
        return report


def _lost_gpu(error: BaseException) -> bool:
    """Whether a kernel has gone wrong on a GPU: nothing works there in this process any more."""
    if isinstance(error, CheckFailedError):
        return False
    seen: list[BaseException | None] = [None]  # a chain of causes may be a circle
    while error not in seen:
        if re.search(r"CUDA error|Triton Error \[CUDA\]", text_of(error)):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return False


def _status(error: BaseException, line: int) -> str:
    if isinstance(error, NotImplementedError) and text_of(error).startswith("TODO"):
        return "todo"
    if isinstance(error, CheckFailedError) or (isinstance(error, AssertionError) and not line):
        return "fail"
    return "error"


def learner_frame(traceback: TracebackType | None, file: str) -> tuple[int, FrameType | None]:
    """The deepest line of `file` in a traceback, with its frame; 0 and None if it is not in it."""
    found: tuple[int, FrameType | None] = (0, None)
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == file:
            found = traceback.tb_lineno, traceback.tb_frame
        traceback = traceback.tb_next
    return found


def values_of(frame: FrameType | None) -> str:
    """The first few local variables of a function, as "size = 3, start = 2"."""
    if frame is None or frame.f_code.co_name == "<module>":
        return ""
    values = [
        f"{name} = {describe(value)}"
        for name, value in frame.f_locals.items()
        if not name.startswith((".", "_"))
        and name != "self"
        and not callable(value)
        and not type(value).__module__.startswith("triton.")  # addresses, or nothing to read
    ]
    while sum(map(len, values)) > MAX_SHOWN:
        values.pop()
    return ", ".join(values)


def _values_unseen(frame: FrameType | None) -> str:
    """The same when a check may be watching what torch is asked to do: it looks away."""
    torch = sys.modules.get("torch")
    if torch is None:
        return values_of(frame)
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        return values_of(frame)


def text_of(error: BaseException) -> str:
    """What an exception says, shortened; its own `__str__` may fail."""
    try:
        text = str(error).strip()
    except Exception:
        return ""
    return text if len(text) <= 600 else text[:600] + " ..."


def compact_trace(trace: Trace | None) -> list[object]:
    """A trace that is small enough to send; equal traces stay equal, and the last value stays."""
    seen = trace.seen if trace else []
    if len(seen) > MAX_OBSERVED:
        seen = [*seen[: MAX_OBSERVED - 1], seen[-1]]
    return [_compact(value) for value in seen]


def _compact(value: object) -> object:
    if isinstance(value, tuple):
        step = -(-len(value) // MAX_VALUES)
        if step > 1:
            value = (f"every {step}. of {len(value)}", *value[::step])
        return [_compact(part) for part in value]
    if isinstance(value, str | bytes) and len(value) > MAX_VALUES:
        data = value.encode("utf-8", "replace") if isinstance(value, str) else value
        return f"{value[:40]!r}... {len(value)} {zlib.crc32(data)}"
    if isinstance(value, bytes):
        return repr(value)
    if isinstance(value, int) and value.bit_length() > 64:
        return f"{value.bit_length()} bits, {value % (2**61 - 1)} modulo 2**61 - 1"
    return value
