"""Tells a reader when other programs took so much of the machine that a time means nothing."""

import os
import time
from functools import cache
from pathlib import Path

from minillm.lab.benchmarks.others import PROC, busy_ticks
from minillm_exercises.widgets import cell_number

LIMIT = 0.2  # fraction of all processors; above it, times are not to be trusted
LEAST_SECONDS = 0.5  # a shorter time has too few ticks of the kernel's clock


class Meter:
    """The fraction of all processors that other programs used, from one reading to the next.

    This process and its descendants, ranks for instance, are not other programs.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self.proc = proc
        self.share = 0.0
        self._before = self._read()

    def _read(self) -> tuple[float, int, int]:
        return time.perf_counter(), busy_ticks(self.proc), family_ticks(os.getpid(), self.proc)

    def read(self) -> float:
        """The fraction since the last reading; the last result again within half a second."""
        if time.perf_counter() - self._before[0] < LEAST_SECONDS:
            return self.share
        now = self._read()
        seconds, busy, ours = (new - old for new, old in zip(now, self._before, strict=True))
        ticks = seconds * os.sysconf("SC_CLK_TCK") * (os.cpu_count() or 1)
        self.share = min(max(0.0, (busy - ours) / ticks), 1.0) if now[1] else 0.0
        self._before = now
        return self.share


def family_ticks(root: int, proc: Path = PROC) -> int:
    """Ticks of a process and its descendants, including those that have ended."""
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for file in proc.glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        each = int(file.parent.name)
        children.setdefault(int(fields[1]), []).append(each)
        ticks[each] = sum(map(int, fields[11:15]))  # its own, and those of children that ended
    total, family = 0, [root]
    while family:
        each = family.pop()
        total += ticks.get(each, 0)
        family += children.get(each, [])
    return total


@cache
def meter() -> Meter:
    """The meter of this process, started at the first call."""
    return Meter()


@cache
def _warned() -> list[int | None]:
    """The cell of the last warning."""
    return [None]


def warning(share: float) -> str:
    """The sentence for a share above the limit, once for each cell of a notebook; else ""."""
    cell, last = cell_number(), _warned()
    if share <= LIMIT or (cell is not None and cell == last[0]):
        return ""
    last[0] = cell
    return f"Other programs took {share:.0%} of this machine: do not trust this measurement."
