"""Processor time of each thread of a process, from Linux's /proc.

Other programs disturb these figures less than wall-clock times: a thread that waits for a processor
uses no processor time, and the time of its waiting is counted separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
MAIN = "main"
OTHERS = "others"  # threads without a name of their own
OWN_NAMES = ("minillm-steps", "minillm-worker")


@dataclass(frozen=True)
class Times:
    """Seconds by thread name: on a processor, and ready without one."""

    processors: dict[str, float]
    waits: dict[str, float]

    def __sub__(self, before: "Times") -> "Times":
        return Times(
            subtract(self.processors, before.processors), subtract(self.waits, before.waits)
        )


def subtract(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """The increase of each value."""
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def thread_times(pid: int, proc: Path = PROC) -> Times:
    """The times of a process by thread name, since the start of each thread; empty where the system
    does not report them."""
    processors: dict[str, float] = {}
    waits: dict[str, float] = {}
    for folder in (proc / str(pid) / "task").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
            on, waited, _ = (folder / "schedstat").read_text().split()
        except (OSError, ValueError):  # the thread has ended, or the kernel does not count
            continue
        if folder.name == str(pid):
            name = MAIN
        elif name not in OWN_NAMES:
            name = OTHERS
        processors[name] = processors.get(name, 0.0) + int(on) / 1e9
        waits[name] = waits.get(name, 0.0) + int(waited) / 1e9
    return Times(processors, waits)
