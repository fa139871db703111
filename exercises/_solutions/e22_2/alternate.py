"""Another way: filters, `bisect` with votes that are remembered, and a sort.

A rate is asked a third time only if two runs disagree. Replicas are counted up until they are
enough, or too many for the GPUs.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from math import inf
from typing import Any


def goodput(
    requests: Sequence[Any], limits: Mapping[str, float], seconds: float
) -> tuple[float, float]:
    """One limit after the other removes those that break it."""
    left = list(filter(None, requests))
    for name in limits:
        left = [each for each in left if not (each.get(name) or -inf) > limits[name]]
    return len(left) / seconds, len(left) / max(len(requests), 1)


def vote(run: Callable[[int], float], share: float, rate: int) -> bool:
    """Whether a rate does not hold: the first opinion that two runs share."""
    votes: Counter[bool] = Counter()
    while 2 not in votes.values():
        votes[run(rate) < share] += 1
    return votes[True] == 2


def highest_rate(run: Callable[[int], float], rates: Sequence[int], share: float) -> int | None:
    """The sorted answers are False, ..., False, True, ..., True."""
    place = bisect_left(rates, True, key=partial(vote, run, share))
    return ([None, *rates])[place]


def tokens_per_dollar(configuration: Any) -> float:
    """What a cent of all its GPUs buys, a hundred times."""
    seconds_of_a_cent = 3600 / (configuration.cents * configuration.gpus)
    return 0 if not configuration.rate else 100 * configuration.tokens * seconds_of_a_cent


def cheapest(configurations: Sequence[Any], demand: int, gpus: int) -> tuple[str, int] | None:
    """Rows of what fits, in the order of the sort."""
    rows = []
    for place, each in enumerate(configurations):
        fit = takewhile(lambda n, each=each: n * each.gpus <= gpus, count(1))
        for n in fit:
            if n * (each.rate or 0) >= demand:
                rows.append((n * each.gpus * each.cents, n * each.gpus, place, n))
                break
    rows.sort(reverse=True)
    return (configurations[rows[-1][2]].name, rows[-1][3]) if rows else None
