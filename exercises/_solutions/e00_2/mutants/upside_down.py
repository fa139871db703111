"""You divided b's time by a's: the question was how many times as long a takes."""

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
    ratios = []
    for i in range(0, 4 * blocks, 4):
        first, second, third, fourth = times[i : i + 4]
        ratios.append((second + third) / (first + fourth))
    return statistics.median(ratios)
