"""e00.1: time a step honestly. The task is in README.md."""

from collections.abc import Callable


def bench(
    step: Callable[[object], object],
    setup: Callable[[], object],
    clock: Callable[[], float],
    sync: Callable[[], None],
    repeats: int,
    warmup: int,
) -> float:
    """Return the median time of ``step(x)`` of `repeats` runs, after `warmup` uncounted runs.

    Args:
        step: launches the work to be timed; it may return before the device has finished.
        setup: makes one new input; this is not part of the time.
        clock: returns the time, in the unit of the result.
        sync: returns when the device has finished all its work.
        repeats: the number of runs that count, at least 1.
        warmup: the number of runs before them, at least 0.
    """
    raise NotImplementedError("TODO e00.1: run, wait, read the clock, repeat, take the median")
