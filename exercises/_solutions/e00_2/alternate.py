"""Another way: strict alternation a b a b, the order the task warns of, and interpolation.

On a slope, the time of the other program at the middle run is the mean of its two neighbours, so
every three consecutive runs give the exact ratio. These groups of three overlap: an interruption
spoils three of them and the jump two, of ``4 * blocks - 2``, so the median is still a good one.
"""

from collections.abc import Callable
from itertools import cycle, islice


def timed(program: Callable[[], object], clock: Callable[[], float]) -> float:
    """What one run of `program` takes."""
    start = clock()
    program()
    return clock() - start


def compare(
    a: Callable[[], object], b: Callable[[], object], clock: Callable[[], float], blocks: int
) -> float:
    """Return how many times as long as b the program a takes."""
    times = [timed(program, clock) for program in islice(cycle((a, b)), 4 * blocks)]
    ratios = []
    for i in range(1, len(times) - 1):
        here, around = times[i], (times[i - 1] + times[i + 1]) / 2
        ratios.append(around / here if i % 2 else here / around)
    return sorted(ratios)[len(ratios) // 2]
