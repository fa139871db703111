"""Good is a property of one request, so it is counted; what is bought is whole replicas.

Percentiles cannot stand for attainment: the requests within one limit need not be those within the
other. The search halves the list, which a single wrong run would lead astray for good, so each
question is answered by the median of three runs: a run that is far off is never in the middle.
And tokens per dollar assume that a replica is busy; a whole one may be half idle.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

HOUR = 3600  # seconds


def goodput(
    requests: Sequence[Any], limits: Mapping[str, float], seconds: float
) -> tuple[float, float]:
    """Good requests per second, and their share of all."""
    good = sum(request is not None and within(request, limits) for request in requests)
    return good / seconds, good / len(requests) if requests else 0.0


def within(request: Mapping[str, float | None], limits: Mapping[str, float]) -> bool:
    """Whether no measure is above its limit; what is not defined is within."""
    values = [(request[name], most) for name, most in limits.items()]
    return all(value is None or value <= most for value, most in values)


def highest_rate(run: Callable[[int], float], rates: Sequence[int], share: float) -> int | None:
    """The rate before the first that does not hold."""
    low, high = 0, len(rates)  # the first rate that does not hold is at low, ..., high
    while low < high:
        middle = (low + high) // 2
        if median(run(rates[middle]) for _ in range(3)) >= share:
            low = middle + 1
        else:
            high = middle
    return rates[low - 1] if low > 0 else None


def tokens_per_dollar(configuration: Any) -> float:
    """The tokens of an hour over the dollars of an hour."""
    if configuration.rate is None:
        return 0.0
    dollars = configuration.gpus * configuration.cents / 100
    return configuration.tokens * HOUR / dollars


def cheapest(configurations: Sequence[Any], demand: int, gpus: int) -> tuple[str, int] | None:
    """The smallest cost, then the fewest GPUs; `min` keeps the first of equals."""
    choices = []
    for each in configurations:
        if each.rate is None:
            continue
        replicas = -(-demand // each.rate)  # rounded up
        used = replicas * each.gpus
        if used <= gpus:
            choices.append((used * each.cents, used, each.name, replicas))
    best = min(choices, key=lambda choice: choice[:2], default=None)
    return best and best[2:]
