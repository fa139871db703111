"""You made all inputs first, and did not wait for their copies before the first run."""

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
    inputs = [setup() for _ in range(warmup + repeats)]
    for x in inputs:
        start = clock()
        step(x)
        sync()  # the step was only launched
        times.append(clock() - start)
    return statistics.median(times[warmup:])
