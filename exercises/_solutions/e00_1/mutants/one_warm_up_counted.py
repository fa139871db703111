"""You dropped one warm-up run too few: the first so many runs do not count."""

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
    """The median time of ``step(x)`` over `repeats` runs, after `warmup` runs that do not count."""
    times = []
    for _ in range(warmup + repeats):
        x = setup()
        sync()  # the copy of x may still be running
        start = clock()
        step(x)
        sync()  # the step was only launched
        times.append(clock() - start)
    return statistics.median(times[max(warmup - 1, 0) :])
