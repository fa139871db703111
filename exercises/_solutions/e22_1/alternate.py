"""Another way: a reply is a row of token times, one per token; percentiles weigh two neighbours.

Tokens of one chunk have the same time, so the number of tokens is the length of the row. A window
is a bisection of the sorted times.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, repeat
from typing import Any

KEYS = ("tpot_guidellm", "tpot_vllm", "ttft", "e2e")


def row(request: Any) -> list[float]:
    """The time of every token of a complete reply."""
    if request.outcome in ("failed", "rejected"):
        return []
    return list(chain.from_iterable(repeat(time, count) for time, count in request.chunks))


def measures(request: Any) -> dict[str, float | None]:
    """Four latencies, counted back from the row."""
    found: dict[str, float | None] = defaultdict(lambda: None)
    match row(request):
        case [first, *rest]:
            last = rest[-1] if rest else first
            found["ttft"] = first - request.due
            found["e2e"] = last - request.due
            found["tpot_guidellm"] = (last - request.due) / (1 + len(rest))
            if rest:
                found["tpot_vllm"] = (last - first) / len(rest)
    return {key: found[key] for key in KEYS}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The two neighbours, each weighted with the distance to the other."""
    row = sorted(values)
    if len(row) < 2:
        return row[0] if row else None
    share, low = math.modf((len(row) - 1) * (percent / 100))
    pair = row[int(low) : int(low) + 2]
    return sum(map(math.prod, zip(pair, (1 - share, share), strict=False)))


def summary(requests: Sequence[Any], percent: float) -> dict[str, float | None]:
    """One pool per key, filled request by request."""
    pools: dict[str, list[float]] = {"itl": []}
    for request in requests:
        for key, value in measures(request).items():
            pools.setdefault(key, []).extend([] if value is None else [value])
        before = None
        for time, count in request.chunks * (request.outcome == "ok"):
            if count and before is not None:
                pools["itl"].append(time - before)
            before = time if count else before
    return {key: percentile(pools.get(key, []), percent) for key in ("itl", *KEYS)}


def throughput(requests: Sequence[Any], start: float, end: float) -> tuple[float, float]:
    """Places of both borders in the sorted times."""
    ends = sorted(request.end for request in requests if request.outcome == "ok")
    times = sorted(chain.from_iterable(map(row, requests)))

    def rate(events: list[float]) -> float:
        return (bisect_left(events, end) - bisect_left(events, start)) / (end - start)

    return rate(ends), rate(times)
