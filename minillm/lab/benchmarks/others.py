"""How much of the processors other programs used during a measurement.

A disturbed run says nothing about an engine: with OpenMP one thread that waits for a processor
makes all others wait for it. So such runs are marked, and taken again.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

PROC = Path("/proc")
DISTURBED = 0.1  # of all processors
LEAST_TICKS = 10  # a shorter time cannot be told from a rounding
IDLE_FIELDS = (3, 4)  # idle, iowait in /proc/stat


def disturbance(results: Iterable[Mapping[str, Any]], effect: str = "") -> list[str]:
    """A sentence where others used more than they may while one of the results was measured."""
    worst = max((one["others"] for one in results), default=0.0)
    if worst <= DISTURBED:
        return []
    return [
        f"Other programs used up to {worst:.0%} of the processors meanwhile{effect}; run it again "
        "on a quiet machine."
    ]


@dataclass
class Watch:
    """The share of all processors that others had, once the block is left; 0 where the kernel does
    not tell. Time that a hypervisor gave to other machines counts."""

    share: float = field(default=0.0)


@contextmanager
def watching(groups: Iterable[int], proc: Path = PROC) -> Iterator[Watch]:
    """Watch while this process and those of some process groups work."""
    watch, groups = Watch(), frozenset(groups)
    busy, own, start = busy_ticks(proc), own_ticks(groups, proc), perf_counter()
    yield watch
    busy, own = busy_ticks(proc) - busy, own_ticks(groups, proc) - own
    ticks = (perf_counter() - start) * os.sysconf("SC_CLK_TCK") if busy else 0.0
    if ticks >= LEAST_TICKS:
        watch.share = min(max(0.0, busy - own) / ticks / (os.cpu_count() or 1), 1.0)


def busy_ticks(proc: Path) -> int:
    """Ticks of all processors in which something ran."""
    try:
        fields = (proc / "stat").read_text().split("\n")[0].split()[1:9]
    except OSError:
        return 0
    return sum(int(each) for place, each in enumerate(fields) if place not in IDLE_FIELDS)


def own_ticks(groups: frozenset[int], proc: Path) -> int:
    """Ticks of this process and of those in `groups`."""
    total = 0
    for file in proc.glob("[0-9]*/stat"):
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[2]) in groups or file.parent.name == str(os.getpid()):
            total += int(fields[11]) + int(fields[12])
    return total
