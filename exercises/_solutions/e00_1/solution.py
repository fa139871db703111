"""Wait for the device, read the clock, run, wait again, read again; then take the median.

Each of these steps has been forgotten in a published benchmark.

Why the median and not the fastest run? They answer different questions. Every disturbance makes a
run slower, so the *minimum* is nearest to what the machine can do (the ceilings of the roofline are
measured in this way), while the *median* is the time that a user usually waits. A mean answers
neither question: one interrupted run of nine can change it by any amount. A real clock has a
resolution. If a step is not much longer than one tick, time a loop of many steps and divide.
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
