"""e22.1: latencies, percentiles and throughput of a trace. The task is in README.md."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A request, for your own trials; the checks pass objects with these fields.

    All times are in seconds. A chunk is a pair: when it arrived, and how many tokens it had.
    """

    due: float
    sent: float
    chunks: list[tuple[float, int]]
    end: float
    outcome: str  # "ok", "failed" or "rejected"


def measures(request: Request) -> dict[str, float | None]:
    """The latencies "ttft", "e2e", "tpot_vllm" and "tpot_guidellm" of a request, in seconds; None
    where one is not defined."""
    raise NotImplementedError("TODO e22.1: differences from due, and two times per token")


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The value at the place (n - 1) * percent / 100 of the sorted values, interpolated linearly;
    None if there are no values."""
    raise NotImplementedError("TODO e22.1: sort, find the place, interpolate")


def summary(requests: Sequence[Request], percent: float) -> dict[str, float | None]:
    """The percentile of each of the four measures, and of "itl", the gaps between the chunks of all
    ok requests together."""
    raise NotImplementedError("TODO e22.1: collect the values of each key, then their percentile")


def throughput(requests: Sequence[Request], start: float, end: float) -> tuple[float, float]:
    """Requests and tokens per second of the ok requests, in the window from `start` up to, but not
    including, `end`."""
    raise NotImplementedError("TODO e22.1: count what is in the window")
