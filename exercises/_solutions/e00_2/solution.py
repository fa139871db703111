"""The order a b b a, with one quotient per block, and the median of these quotients.

If run i takes 1 + i * d times as long, a has the runs i and i + 3 of a block, and b the runs i + 1
and i + 2. Both pairs have the same sum, so d cancels *exactly*, not only on average. Laboratories
compare weights on drifting scales in this order. The next longer order is a b b a b a a b, the
Thue-Morse sequence, which also cancels a quadratic drift.

A block with a jump and blocks with interruptions are outliers. As long as they are fewer than half,
the median of exact quotients does not change at all.
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
