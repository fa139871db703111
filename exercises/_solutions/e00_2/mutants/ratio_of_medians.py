"""You divided the medians of all runs; divide inside each block, then take the median."""

import statistics
from collections.abc import Callable


def compare(
    a: Callable[[], object], b: Callable[[], object], clock: Callable[[], float], blocks: int
) -> float:
    """How many times as long as b does a take?"""

    def seconds(program: Callable[[], object]) -> float:
        start = clock()
        program()
        return clock() - start

    times = [seconds(program) for program in (a, b, b, a) * blocks]
    times_a, times_b = [], []
    for i in range(0, 4 * blocks, 4):
        first, second, third, fourth = times[i : i + 4]
        times_a += [first, fourth]
        times_b += [second, third]
    return statistics.median(times_a) / statistics.median(times_b)
