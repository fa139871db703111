"""Honest timing: warm up, wait for the device, repeat, and say how much the times disagree.

The rules are those of chapter 00. `MINILLM_QUICK=1` times once and does not warm up: a test that
only wants a chapter's facts sets it, and so proves that no fact depends on a clock.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from minillm_exercises import disturbance
from minillm_exercises.errors import ExerciseError


@dataclass(frozen=True)
class Timing:
    """Seconds of every counted run in order; `first` is the first run ever, usually a warm-up."""

    times: tuple[float, ...]
    first: float

    @property
    def count(self) -> int:
        """How many runs were counted."""
        return len(self.times)

    @property
    def median(self) -> float:
        """The middle run: a run that was interrupted cannot move it (seconds)."""
        return statistics.median(self.times)

    @property
    def low(self) -> float:
        """The first quartile: a quarter of the runs was faster (seconds)."""
        return self._quartiles()[0]

    @property
    def high(self) -> float:
        """The third quartile: a quarter of the runs was slower (seconds)."""
        return self._quartiles()[1]

    def _quartiles(self) -> tuple[float, float]:
        if self.count == 1:
            return self.times[0], self.times[0]
        first, _, third = statistics.quantiles(self.times, n=4, method="inclusive")
        return first, third

    def __str__(self) -> str:
        scale, unit = _unit(self.median)
        low, high, first = (f"{t * scale:.3g}" for t in (self.low, self.high, self.first))
        runs = f"{self.count} run{'s' * (self.count > 1)}"
        return (
            f"{self.median * scale:.3g} {unit} (middle half {low} to {high}, {runs}, "
            f"the first {first})"
        )

    __repr__ = __str__


def measure(
    step: Callable[..., Any],
    *,
    setup: Callable[[], Any] | None = None,
    repeats: int = 7,
    warmup: int = 1,
    budget: float = 1.0,
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Time ``step()``, or ``step(setup())`` with a fresh, untimed input for every run.

    After `warmup` runs it repeats until `repeats` runs or `budget` seconds of runs are reached,
    whichever comes first, but at least three times (once after a first run longer than the
    budget). A GPU returns before it has finished, so with a `device` of "cuda" the clock is read
    after a synchronisation. A sentence is printed if other programs took much of the machine.

    Raises:
        ExerciseError: `repeats` below 1, `warmup` below 0 or no positive `budget`.
    """
    if repeats < 1 or warmup < 0 or not budget > 0:
        raise ExerciseError(
            f"measure() was given repeats={repeats}, warmup={warmup}, budget={budget}; it needs "
            f"repeats of at least 1, warmup of at least 0 and a positive budget in seconds."
        )
    quick = bool(os.environ.get("MINILLM_QUICK"))
    if quick:
        repeats, warmup = 1, 0
    else:
        disturbance.meter()  # from here on

    def once() -> float:
        arguments = () if setup is None else (setup(),)
        _synchronise(device)
        start = clock()
        step(*arguments)
        _synchronise(device)
        return clock() - start

    warm = [once() for _ in range(warmup)]
    times = [once()]
    least = 1 if times[0] > budget else min(3, repeats)
    while len(times) < least or (len(times) < repeats and sum(times) < budget):
        times.append(once())
    if not quick and (warning := disturbance.warning(disturbance.meter().read())):
        sys.stdout.write(warning + "\n")
    return Timing(tuple(times), (warm + times)[0])


def _synchronise(device: str) -> None:
    if device.startswith("cuda"):
        sys.modules["torch"].cuda.synchronize(device)


def _unit(seconds: float) -> tuple[float, str]:
    for scale, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        if seconds * scale >= 1:
            return scale, unit
    return 1e9, "ns"
