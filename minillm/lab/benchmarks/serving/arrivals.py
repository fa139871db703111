"""When requests are sent: constant, Poisson and gamma arrivals.

Gamma arrivals are those of ``vllm bench serve``: the gaps have shape b (the burstiness) and mean
1 / rate, so their coefficient of variation is 1 / sqrt(b). b = 1 is a Poisson process, smaller
values give bursts, and infinity gives constant gaps. Unlike vLLM, times are not rescaled to end at
exactly count / rate, because the process would not be a Poisson process any more.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Arrivals:
    """A process of arrivals.

    Attributes:
        rate: requests per second; infinity sends all of them at once.
        burstiness: shape of the gamma distribution of the gaps.
    """

    rate: float
    burstiness: float = 1.0

    def times(self, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds from the start at which `count` requests are sent, the first of them at 0."""
        if math.isinf(self.rate):
            return np.zeros(count)
        # Arrivals at rate 1, which are then stretched.
        units = np.cumsum(unit_gaps(count, self.burstiness, rng))
        units -= units[:1]
        return units / self.rate

    def describe(self) -> str:
        """The process in words, without its rate."""
        if math.isinf(self.rate):
            return "all requests at once"
        if math.isinf(self.burstiness):
            return "constant gaps"
        if self.burstiness == 1:
            return "Poisson arrivals"
        return f"gamma arrivals of burstiness {self.burstiness:g}"


def unit_gaps(count: int, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Gaps with mean 1 and coefficient of variation 1 / sqrt(burstiness)."""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(shape=burstiness, scale=1.0 / burstiness, size=count)
