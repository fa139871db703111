"""Latencies begin when a request was due, and end with text; every statistic has its own requests.

`due` and not `sent`: a load generator that is stuck behind a slow server sends late, and a clock
that starts with the sending leaves out the very wait that the slow server caused (G. Tene calls it
coordinated omission). The clocks of vLLM's tool, aiperf and guidellm do start with the sending. The
two times per output token differ by the prompt: vLLM's has only the tokens after the first,
guidellm's spreads the time to the first token over all of them.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

KEYS = ("ttft", "e2e", "tpot_vllm", "tpot_guidellm")


def measures(request: Any) -> dict[str, float | None]:
    """The four latencies of a request, in seconds."""
    times = arrivals(request)
    if not times:
        return dict.fromkeys(KEYS)
    tokens = sum(count for _, count in request.chunks)
    ttft, e2e = times[0] - request.due, times[-1] - request.due
    after_first = (e2e - ttft) / (tokens - 1) if tokens > 1 else None
    return {"ttft": ttft, "e2e": e2e, "tpot_vllm": after_first, "tpot_guidellm": e2e / tokens}


def arrivals(request: Any) -> list[float]:
    """When the chunks with tokens arrived; none if the request is not ok."""
    if request.outcome != "ok":
        return []
    return [time for time, tokens in request.chunks if tokens > 0]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The interpolated value at the place (n - 1) * percent / 100."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summary(requests: Sequence[Any], percent: float) -> dict[str, float | None]:
    """Percentiles of the four measures and of all gaps."""
    found = [measures(request) for request in requests]
    pools: dict[str, list[float]] = {
        key: [each for one in found if (each := one[key]) is not None] for key in KEYS
    }
    pools["itl"] = [
        later - earlier for request in requests for earlier, later in pairwise(arrivals(request))
    ]
    return {key: percentile(values, percent) for key, values in pools.items()}


def throughput(requests: Sequence[Any], start: float, end: float) -> tuple[float, float]:
    """Requests and tokens per second within the window."""
    ok = [request for request in requests if request.outcome == "ok"]
    ended = sum(start <= request.end < end for request in ok)
    tokens = sum(count for request in ok for time, count in request.chunks if start <= time < end)
    return ended / (end - start), tokens / (end - start)
