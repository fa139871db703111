"""How much time and memory a submission may use, and how its process is held to that."""

import contextlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

GIB = 2**30


@dataclass(frozen=True)
class Limits:
    """Per check: seconds of CPU time (an endless loop), seconds on the clock (waiting for
    nothing); per submission: bytes of memory above what Python, torch and the checks need."""

    cpu: float = 2.0
    wall: float = 10.0
    memory: int | None = GIB
    files: int = 64  # open at a time
    file_size: int = 2**20


DEFAULT = Limits()
# CUDA reserves address space without end and opens a hundred files; a kernel has to be compiled.
ON_GPU = Limits(cpu=20.0, wall=30.0, memory=None, files=4096, file_size=2**28)


def restrict(limits: Limits) -> None:
    """Hold this process to `limits`, as far as the system can (Windows cannot)."""
    try:
        import resource
    except ImportError:
        return
    bounds = {
        "RLIMIT_CORE": 0,
        "RLIMIT_NOFILE": limits.files,
        "RLIMIT_FSIZE": limits.file_size,
        "RLIMIT_AS": _memory(limits),
    }
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
    """Call `handler` in this process when an alarm of `set_alarm` goes off."""
    if hasattr(signal, "setitimer"):
        signal.signal(signal.SIGPROF, handler)
        signal.signal(signal.SIGALRM, handler)


def set_alarm(limits: Limits) -> None:
    """Start the two clocks of a check anew."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, limits.cpu)
        signal.setitimer(signal.ITIMER_REAL, limits.wall)
