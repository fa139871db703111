"""Tells a reader when other programs took so much of the machine that a time means nothing."""

import os
import time
from functools import cache
from pathlib import Path

from minillm.lab.benchmarks.others import PROC, busy_ticks, group_ticks

LIMIT = 0.2  # fraction of all processors; above it, times are not to be trusted
LEAST_SECONDS = 0.5  # a shorter time has too few ticks of the kernel's clock


class Meter:
    """The fraction of all processors that other programs used, from one reading to the next.

    The processes of this program's process group are not other programs.
    """

    def __init__(self, proc: Path = PROC) -> None:
        self.proc = proc
        self.share = 0.0
        self._before = self._read()

    def _read(self) -> tuple[float, int, int]:
        ours = group_ticks(frozenset((os.getpgrp(),)), self.proc, os.getpid())
        return time.perf_counter(), busy_ticks(self.proc), ours

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


@cache
def meter() -> Meter:
    """The meter of this process, started at the first call."""
    return Meter()


def warning(share: float) -> str:
    """The sentence for a share above the limit, and "" below it."""
    if share <= LIMIT:
        return ""
    return f"Other programs took {share:.0%} of this machine: do not trust this measurement."
