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
    """The median time of ``step(x)`` over `repeats` runs, after `warmup` runs that do not count.

    Args:
        step: what to time; it may return before the device has done its work.
        setup: makes one fresh input; not part of the time.
        clock: returns the time, in the unit of the result.
        sync: returns when the device has nothing left to do.
        repeats: runs that count, at least 1.
        warmup: runs before them, 0 or more.
    """
    raise NotImplementedError("TODO e00.1: run, wait, read the clock, repeat, take the median")
