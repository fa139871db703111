"""You ran all of a and then all of b: what the machine did in between looks like b."""

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

    times = [seconds(program) for program in (a, a) * blocks + (b, b) * blocks]
    ratios = []
    for i in range(2 * blocks):
        first, second = times[i], times[i + 2 * blocks]
        ratios.append(first / second)
    return statistics.median(ratios)
