"""Processor time of each thread of a process, from Linux's /proc.

Other programs disturb these figures less than wall-clock times: a thread that waits for a processor
uses no processor time, and the time of its waiting is counted separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

PROC = Path("/proc")
STEPS = "step thread"
NAMES: Mapping[str, str] = MappingProxyType({"minillm-steps": STEPS, "minillm-worker": "C worker"})
OTHERS = "other threads"


@dataclass(frozen=True)
class Times:
    """Seconds by thread: on a processor, and ready without one."""

    processors: dict[str, float]
    waits: dict[str, float]

    def __sub__(self, before: "Times") -> "Times":
        return Times(
            subtract(self.processors, before.processors), subtract(self.waits, before.waits)
        )


def subtract(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The increase of each value."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def thread_times(pid: int, main: str, proc: Path = PROC) -> Times:
    """The times of a process since the start of each thread, by what the threads do; `main` is what
    the main thread does. Empty where the system does not report them."""
    processors: dict[str, float] = {}
    waits: dict[str, float] = {}
    for folder in (proc / str(pid) / "task").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
            on, waited, _ = (folder / "schedstat").read_text().split()
        except (OSError, ValueError):  # the thread has ended, or the kernel does not count
            continue
        name = main if folder.name == str(pid) else NAMES.get(name, OTHERS)
        processors[name] = processors.get(name, 0.0) + int(on) / 1e9
        waits[name] = waits.get(name, 0.0) + int(waited) / 1e9
    return Times(processors, waits)
