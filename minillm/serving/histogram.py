"""A histogram for Prometheus that counts many equal observations at once.

prometheus-client's histogram takes one observation at a time, under a lock. An event of a stream
may have several tokens, and their gaps are observed together, in one thread.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

# vLLM's buckets, in seconds or in numbers.
TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
        20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
             10.0, 20.0, 40.0, 80.0)  # fmt: skip
LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
           240.0, 480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
COMPLETIONS = (1, 2, 5, 10, 20)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)


def token_bounds(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `longest`, as vLLM's buckets of token counts."""
    found = [each * 10**power for power in range(len(str(longest))) for each in (1, 2, 5)]
    return tuple(each for each in found if each <= longest)


class Histogram:
    """Counts of observations by bucket, and their sum. `bounds` are the buckets' upper bounds,
    which belong to the bucket; the last bucket has no bound.

    One thread observes; any thread may read `buckets` and `total`.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value`."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def buckets(self) -> list[tuple[str, float]]:
        """The upper bound of each bucket and the observations up to it."""
        names = [*(str(float(each)) for each in self.bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))
