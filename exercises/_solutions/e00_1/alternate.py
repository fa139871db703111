"""Another way: all inputs are made first, and there is one reading of the clock between two runs.

The time of a run is the difference of two neighbouring readings. The price is that all inputs are
held at once. The median is found without sorting, by counting the smaller times.
"""

from collections.abc import Callable, Iterator
from itertools import islice, pairwise


def readings(
    step: Callable[[object], object],
    inputs: list[object],
    clock: Callable[[], float],
    sync: Callable[[], None],
) -> Iterator[float]:
    """The time before the first run, then after each of them; the device is idle at each."""
    sync()
    yield clock()
    while inputs:
        step(inputs.pop())
        sync()
        yield clock()


def of_rank(values: list[float], rank: int) -> float:
    """The value that would stand at place `rank`, from 0, were they sorted."""
    return next(
        v for v in values if sum(w < v for w in values) <= rank < sum(w <= v for w in values)
    )


def bench(
    step: Callable[[object], object],
    setup: Callable[[], object],
    clock: Callable[[], float],
    sync: Callable[[], None],
    repeats: int,
    warmup: int,
) -> float:
    """Return the median time of ``step(x)`` of `repeats` runs, after `warmup` uncounted runs."""
    inputs = [setup() for _ in range(warmup + repeats)]
    posts = islice(readings(step, inputs, clock, sync), warmup, None)
    times = [after - before for before, after in pairwise(posts)]
    return (of_rank(times, (repeats - 1) // 2) + of_rank(times, repeats // 2)) / 2
