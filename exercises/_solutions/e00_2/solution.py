"""The order a b b a, and the quotient taken inside each block, before anything is averaged.

If run i takes 1 + i * d times as long, a has the runs i and i + 3 of a block and b the runs i + 1
and i + 2: both pairs of numbers have the same sum, so d cancels *exactly*, not on average.
Laboratories compare weights on drifting scales in this order. The next longer one is a b b a b a
a b, the Thue-Morse sequence: it cancels a quadratic drift as well.

What is left, one block with a jump in it and some with interruptions, are outliers, and a median
of quotients does not move far as long as they are fewer than half. Among exact quotients it does
not move at all.
"""

import statistics
from collections.abc import Callable


def compare(
    a: Callable[[], object], b: Callable[[], object], clock: Callable[[], float], blocks: int
) -> float:
    """Return how many times as long as b the program a takes."""

    def seconds(program: Callable[[], object]) -> float:
        start = clock()
        program()
        return clock() - start

    times = [seconds(program) for program in (a, b, b, a) * blocks]
    ratios = []
    for i in range(0, 4 * blocks, 4):
        first, second, third, fourth = times[i : i + 4]
        ratios.append((first + fourth) / (second + third))
    return statistics.median(ratios)
