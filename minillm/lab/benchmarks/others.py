"""Detects how much of the processors other programs used during a measurement.

Disturbed runs are marked and repeated: with OpenMP, one thread that waits for a processor delays
all threads. Runs are selected by the processor use of other programs, never by their own duration.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, Generic, TypeVar

T = TypeVar("T")
PROC = Path("/proc")
DISTURBED = 0.1  # fraction of all processors
LEAST_TICKS = 10  # shorter times are within the rounding of ticks
IDLE_FIELDS = (3, 4)  # idle, iowait in /proc/stat
TRIES = 3
PATIENCE = 1.0  # seconds before another try
LEAST_SECONDS = 0.25  # shortest measurement in which other programs can be detected


def disturbance(results: Iterable[Mapping[str, Any]], effect: str = "") -> list[str]:
    """A warning if other programs disturbed the measurement of one of the results."""
    worst = max((one["others"] for one in results), default=0.0)
    if worst <= DISTURBED:
        return []
    return [
        f"Other programs used up to {worst:.0%} of the processors meanwhile{effect}; run it again "
        "on an idle machine."
    ]


@dataclass
class Watch:
    """Fractions of all processors, set at the end of the block; 0 if the kernel does not report
    them. `share` is what other programs used, and what the hypervisor gave to other machines;
    `busy` is what our own busy processes used."""

    share: float = field(default=0.0)
    busy: float = field(default=0.0)


@contextmanager
def watching(
    groups: Iterable[int], proc: Path = PROC, busy: Collection[int] = ()
) -> Iterator[Watch]:
    """Watch a block in which this process and those of `groups` work. The process groups `busy` are
    busy processes of the benchmark, which are not other programs."""
    watch, ours = Watch(), frozenset(busy)
    groups = frozenset(groups) | ours
    used, own, start = busy_ticks(proc), group_ticks(groups, proc, os.getpid()), perf_counter()
    before = group_ticks(ours, proc)
    yield watch
    used, own = busy_ticks(proc) - used, group_ticks(groups, proc, os.getpid()) - own
    ticks = (perf_counter() - start) * os.sysconf("SC_CLK_TCK") if used else 0.0
    if ticks >= LEAST_TICKS:
        ticks *= os.cpu_count() or 1
        watch.share = min(max(0.0, used - own) / ticks, 1.0)
        watch.busy = min((group_ticks(ours, proc) - before) / ticks, 1.0)


@dataclass(frozen=True)
class Calm(Generic[T]):
    """A measured value, and the fraction of the processors that other programs used meanwhile."""

    value: T
    others: float


def calmly(run: Callable[[], T]) -> Calm[T]:
    """The first undisturbed run, or the least disturbed of `TRIES` runs."""
    found: list[Calm[T]] = []
    for number in range(TRIES):
        if number:
            sleep(PATIENCE)
        with watching([]) as watch:
            value = run()
        found.append(Calm(value, watch.share))
        if watch.share <= DISTURBED:
            break
    return min(found, key=lambda one: one.others)


def calmest(rounds: Sequence[Calm[T]]) -> list[Calm[T]]:
    """The undisturbed rounds; if there are none, the least disturbed round."""
    calm = [round_ for round_ in rounds if round_.others <= DISTURBED]
    return calm or [min(rounds, key=lambda each: each.others)]


def reported(proc: Path = PROC) -> bool:
    """Whether the kernel reports the time of all processors (Linux does)."""
    return (proc / "stat").exists()


def busy_ticks(proc: Path) -> int:
    """Busy ticks, summed over all processors."""
    try:
        fields = (proc / "stat").read_text().split("\n")[0].split()[1:9]
    except OSError:
        return 0
    return sum(int(each) for place, each in enumerate(fields) if place not in IDLE_FIELDS)


def group_ticks(groups: frozenset[int], proc: Path, pid: int | None = None) -> int:
    """Ticks of the processes in `groups`, and of the process `pid`."""
    total = 0
    for file in proc.glob("[0-9]*/stat") if groups or pid is not None else ():
        try:
            fields = file.read_text().rpartition(")")[2].split()
        except OSError:  # the process has ended
            continue
        if int(fields[2]) in groups or file.parent.name == str(pid):
            total += int(fields[11]) + int(fields[12])
    return total
