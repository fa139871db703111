"""How much time and memory a submission may use, and how its process is held to that.

Time is processor time, of all threads together, so that neither a slow machine nor other programs
make a right solution late. Two alarms count it. `ITIMER_PROF` calls a function of ours, which knows
the line and its variables, but only between two steps of Python. `RLIMIT_CPU` comes a little later
and ends the process even in the middle of one long operation. Windows has neither: there
`Limits.wall` is the only limit.
"""

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """Per check: seconds of processor time (an endless loop), forty times what the slowest right
    solution takes on a laptop, and seconds on the clock in which nothing is computed (waiting);
    per submission: bytes of memory above what Python, torch and the checks need."""

    cpu: float = 5.0
    wall: float = 60.0
    memory: int | None = GIB
    files: int = 64  # open at a time
    file_size: int = 2**20


LATER = 1.0  # seconds between the two alarms, for the report of the first
DEFAULT = Limits()
# CUDA reserves address space without end and opens a hundred files; a kernel has to be compiled.
ON_GPU = Limits(cpu=20.0, wall=120.0, memory=None, files=4096, file_size=2**28)


def restrict(limits: Limits) -> None:
    """Hold this process to `limits`, as far as the system can (Windows cannot)."""
    try:
        import resource
    except ImportError:
        return
    bounds = {
        "RLIMIT_CORE": 0, "RLIMIT_NOFILE": limits.files, "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_AS": _memory(limits),
    }  # fmt: skip
    for name, value in bounds.items():
        kind = getattr(resource, name, None)
        if kind is not None and value is not None:
            hard = resource.getrlimit(kind)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            with contextlib.suppress(OSError, ValueError):  # macOS refuses some
                resource.setrlimit(kind, (value, value))


def _memory(limits: Limits) -> int | None:
    used = _address_space()
    return None if limits.memory is None or not used else used + limits.memory


def _address_space() -> int:
    """Bytes of address space in use; 0 where the system does not say so in /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except (OSError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def on_alarm(handler: Callable[[int, FrameType | None], None]) -> None:
    """Call `handler` in this process when the processor time of `set_alarm` is used up."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, handler)


def set_alarm(limits: Limits) -> None:
    """Start the processor time of a check anew."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limits.cpu)
        _end_after(limits.cpu + LATER)


def _end_after(seconds: float) -> None:
    """SIGXCPU to this process in so many seconds of processor time: the limit counts from the
    beginning of the process, in whole seconds."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    soft = math.ceil(time.process_time() + seconds)
    soft = soft if most == resource.RLIM_INFINITY else min(soft, most)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, most))


def processor_time(process_id: int) -> float | None:
    """Seconds of processor time that another process has used; None if the system does not say."""
    try:
        return time.clock_gettime(~process_id << 3 | 2)  # Linux: CPUCLOCK_SCHED of a process
    except (AttributeError, OSError):
        return None
