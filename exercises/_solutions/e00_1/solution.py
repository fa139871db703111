"""Six lines, and each of them has been forgotten in a published benchmark.

Why the median and not the fastest run? They answer different questions. Whatever disturbs a run
makes it slower, so the *minimum* comes nearest to what the machine can do (that is how the ceilings
of the roofline are measured), while the *median* is what somebody will wait. A mean answers
neither: one interrupted run of nine moves it as far as it likes. And a clock has a grain: where a
step is not far longer than one tick of the real clock, time a loop of many and divide.
"""

import statistics
from collections.abc import Callable


def bench(
    step: Callable[[object], object],
    setup: Callable[[], object],
    clock: Callable[[], float],
    sync: Callable[[], None],
    repeats: int,
    warmup: int,
) -> float:
    """Return the median time of ``step(x)`` of `repeats` runs, after `warmup` uncounted runs."""
    times = []
    for _ in range(warmup + repeats):
        x = setup()
        sync()  # the copy of x may still be running
        start = clock()
        step(x)
        sync()  # the step was only launched
        times.append(clock() - start)
    return statistics.median(times[warmup:])
