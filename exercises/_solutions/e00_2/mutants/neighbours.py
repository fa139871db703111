"""You divided each a by the b that follows it: on a machine that slows down b is always later."""

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

    times = [seconds(program) for program in (a, b, a, b) * blocks]
    ratios = []
    for i in range(0, 4 * blocks, 4):
        first, second, third, fourth = times[i : i + 4]
        ratios += [first / second, third / fourth]
    return statistics.median(ratios)
