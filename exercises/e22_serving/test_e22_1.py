"""The public checks of e22.1: single requests, percentiles, what is pooled, the window."""

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, seeds

KEYS = ("ttft", "e2e", "tpot_vllm", "tpot_guidellm")
Values = dict[str, float | None]


@dataclass
class Request:
    """A request with the fields of the README."""

    due: float
    sent: float
    chunks: list[tuple[float, int]]
    end: float
    outcome: str = "ok"


A = Request(0.0, 0.0, [(0.2, 0), (0.5, 1), (0.7, 1), (1.1, 2), (1.1, 0)], 1.2)
B = Request(0.1, 0.3, [(0.9, 1)], 1.0)
C = Request(0.2, 0.2, [(0.8, 1)], 0.9, "failed")
D = Request(0.4, 0.4, [], 0.4, "rejected")
PLAIN = Request(1.0, 1.0, [(1.5, 1), (1.75, 1), (2.0, 1), (2.5, 1), (3.0, 1)], 3.0)


def want_measures(request: Request) -> Values:
    """The measures by their definitions."""
    chunks = [chunk for chunk in request.chunks if chunk[1]]
    if request.outcome != "ok" or not chunks:
        return dict.fromkeys(KEYS)
    n = sum(count for _, count in chunks)
    first, last = chunks[0][0], chunks[-1][0]
    tpot = (last - first) / (n - 1) if n > 1 else None
    e2e = last - request.due
    return dict(zip(KEYS, (first - request.due, e2e, tpot, e2e / n), strict=True))


def want_percentile(values: Sequence[float], percent: float) -> float | None:
    """The percentile by its definition."""
    if not values:
        return None
    row = sorted(values)
    for place, (low, high) in enumerate(pairwise(row)):
        share = (len(row) - 1) * percent / 100 - place
        if share < 1:
            return low + (high - low) * share
    return row[-1]


def want_summary(requests: Sequence[Request], percent: float) -> Values:
    """The summary by its definitions."""
    found = [want_measures(request) for request in requests]
    pools = {key: [v for one in found if (v := one[key]) is not None] for key in KEYS}
    pools["itl"] = []
    for request in requests:
        times = [time for time, count in request.chunks if count and request.outcome == "ok"]
        pools["itl"] += [later - earlier for earlier, later in pairwise(times)]
    return {key: want_percentile(values, percent) for key, values in pools.items()}


def shown(request: Request) -> str:
    """A request in one line."""
    where = f"due {request.due:g}, sent {request.sent:g}, chunks {request.chunks}"
    return f"{where}, end {request.end:g}, {request.outcome}"


def same(got: Any, want: Values, what: str, case: str, only: Sequence[str] = ()) -> None:
    """A dictionary has these values, None where there is none."""
    found = accept(got, f"{what} is a dictionary", case)
    is_map = isinstance(found, dict)
    expect(is_map, f"{what} ({case}): expected a dictionary, got {found!r}.", found)
    equal(sorted(map(str, found)), sorted(want), f"{what}: its keys", case)
    for key in only or want:
        compare = equal if want[key] is None else close
        compare(found[key], want[key], f"{what}: {key}", case)


def measured(impl: Any, what: str, request: Request, *only: str) -> None:
    """One request has its measures; the request stays as it is."""
    given = copy.deepcopy(request)
    same(impl.measures(given), want_measures(request), what, shown(request), only)
    equal(given.chunks, request.chunks, "measures may not change the request", shown(request))


def summed(impl: Any, what: str, requests: list[Request], percent: float, *only: str) -> None:
    """A trace has its summary; the requests stay as they are."""
    given = copy.deepcopy(requests)
    short = "; ".join(map(shown, requests)) if len(requests) < 4 else f"{len(requests)} requests"
    case = f"percent {percent}; {short}"
    same(impl.summary(given, percent), want_summary(requests, percent), what, case, only)
    chunks = [request.chunks for request in given]
    equal(chunks, [r.chunks for r in requests], "summary may not change the requests")


def through(
    impl: Any, what: str, requests: list[Request], start: float, end: float, want: Sequence[float]
) -> None:
    """A trace has this throughput."""
    short = "; ".join(map(shown, requests)) if len(requests) < 4 else f"{len(requests)} requests"
    got = impl.throughput(copy.deepcopy(requests), start, end)
    close(got, want, what, f"from {start:g} to {end:g}; {short}")


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Four requests, their summary, and a window."""
    for name, request in zip("abcd", (A, B, C, D), strict=True):
        measured(impl, f"measures({name}) of the example", request)
    want = {"ttft": 0.65, "e2e": 0.95, "tpot_vllm": 0.2, "tpot_guidellm": 0.5375, "itl": 0.3}
    got = impl.summary(copy.deepcopy([A, B, C, D]), 50)
    same(got, want, "The summary of the example", "percent 50")
    what = "Requests and tokens per second of the example"
    through(impl, what, [A, B, C, D], 0.6, 1.1, (2.0, 4.0))


@check(2, "The measures of a request")
def test_measures(impl: Any) -> None:
    """One trap at a time, on a request of five tokens."""
    measured(impl, "Five chunks of a token each", PLAIN)
    late = Request(0.5, 1.0, PLAIN.chunks, 3.0)
    measured(impl, "A request that was sent 0.5 s late", late)
    closed = Request(1.0, 1.0, PLAIN.chunks, 9.0)
    measured(impl, "A connection that was closed later", closed)
    role = Request(1.0, 1.0, [(1.25, 0), *PLAIN.chunks], 3.0)
    measured(impl, "A first chunk without tokens", role)
    usage = Request(1.0, 1.0, [*PLAIN.chunks, (4.0, 0)], 4.0)
    measured(impl, "A last chunk without tokens", usage)


@check(2, "Chunks of many tokens, single tokens, none")
def test_tokens(impl: Any) -> None:
    """The number of tokens is not the number of chunks."""
    many = Request(1.0, 1.0, [(1.5, 1), (2.0, 4), (3.5, 3)], 3.5)
    measured(impl, "Chunks of 1, 4 and 3 tokens", many)
    first = Request(1.0, 1.0, [(1.5, 3), (2.0, 1), (4.0, 2)], 4.0)
    measured(impl, "A first chunk of 3 tokens, then 1 and 2", first)
    measured(impl, "One chunk of 4 tokens", Request(1.0, 1.0, [(1.5, 4)], 1.5))
    measured(impl, "A reply of one token", Request(1.0, 1.0, [(1.5, 1)], 1.5))
    measured(impl, "An ok reply without tokens", Request(1.0, 1.0, [(1.5, 0)], 1.5))
    measured(impl, "An ok reply without chunks", Request(1.0, 1.0, [], 1.5))


@check(1, "Requests that failed")
def test_failed(impl: Any) -> None:
    """A failed request has chunks and no measures."""
    failed = Request(1.0, 1.0, PLAIN.chunks, 3.0, "failed")
    measured(impl, "A request that failed after five tokens", failed)
    measured(impl, "A rejected request", Request(1.0, 1.0, [], 1.0, "rejected"))
    trace = [PLAIN, failed, Request(1.0, 1.0, [(8.0, 1), (9.0, 1)], 9.0, "failed")]
    summed(impl, "Of one good and two failed requests", trace, 90)
    summed(impl, "Of failed requests alone", trace[1:], 50)


@check(2, "Percentiles")
def test_percentile(impl: Any) -> None:
    """Known ones, unsorted values, one value, none."""
    values = [40.0, 10.0, 30.0, 20.0]
    given = list(values)
    for percent, want in (
        (50, 25.0),
        (0, 10.0),
        (100, 40.0),
        (90, 37.0),
        (25, 17.5),
        (99.9, 39.97),
    ):
        case = f"percentile({values}, {percent})"
        close(impl.percentile(given, percent), want, "A percentile of 10, 20, 30, 40", case)
    equal(given, values, "percentile may not change the values")
    close(impl.percentile([3.0, 1.0, 2.0], 50), 2.0, "The middle of three", "[3, 1, 2], 50")
    close(impl.percentile([7.0], 99), 7.0, "A percentile of one value", "percentile([7.0], 99)")
    close(impl.percentile([0.0, 1.0], 30), 0.3, "A percentile of two values", "[0, 1], 30")
    equal(impl.percentile([], 50), None, "A percentile of no values", "percentile([], 50)")
    for seed in seeds(20):
        draw = random.Random(seed)
        many = [float(draw.randint(0, 99)) for _ in range(draw.randint(2, 30))]
        percent = draw.choice([1, 5, 50, 75, 90, 95, 99])
        case = f"percentile({many}, {percent})"
        close(impl.percentile(list(many), percent), want_percentile(many, percent),
              "A percentile of random values", case)  # fmt: skip


@check(2, "What is in a percentile")
def test_pools(impl: Any) -> None:
    """Values that are None are left out; gaps are pooled, one per chunk, within a request."""
    single = Request(1.0, 1.0, [(1.25, 1)], 1.5)
    summed(impl, "One token beside five", [single, PLAIN], 50, "tpot_vllm", "ttft")
    summed(impl, "Single tokens alone", [single, single], 50)
    busy = Request(0.0, 0.0, [(i / 8, 1) for i in range(1, 12)], 2.0)
    slow = Request(0.0, 0.0, [(1.0, 1), (3.0, 1)], 3.0)
    summed(impl, "Ten gaps of 1/8 s and one of 2 s", [busy, slow], 50, "itl", "tpot_vllm")
    summed(impl, "Ten gaps of 1/8 s and one of 2 s", [busy, slow], 95, "itl")
    chunks = Request(0.0, 0.0, [(0.5, 1), (1.5, 4), (3.5, 2)], 3.5)
    summed(impl, "Gaps before chunks of 4 and 2 tokens", [chunks], 50, "itl")
    holes = Request(0.0, 0.0, [(0.25, 0), (0.5, 1), (0.75, 0), (2.0, 1), (3.0, 0)], 3.0)
    summed(impl, "A gap with a chunk of 0 tokens in it", [holes], 0, "itl")
    summed(impl, "No requests", [], 50)


@check(2, "The window of the throughput")
def test_window(impl: Any) -> None:
    """Tokens by their arrival, requests by their end, borders, failures."""
    one = Request(0.0, 0.0, [(1.0, 1), (2.0, 4), (3.0, 2)], 3.5)
    what = "Requests and tokens per second"
    through(impl, f"{what}, all in the window", [one], 0.0, 4.0, (0.25, 1.75))
    through(impl, f"{what}, ended after the window", [one], 0.0, 2.5, (0.0, 2.0))
    through(impl, f"{what}, begun before the window", [one], 1.5, 4.0, (0.4, 2.4))
    through(impl, f"{what}, a chunk at the start", [one], 2.0, 4.0, (0.5, 3.0))
    through(impl, f"{what}, a chunk at the end", [one], 0.0, 2.0, (0.0, 0.5))
    through(impl, f"{what}, ended at the end", [one], 2.5, 3.5, (0.0, 2.0))
    through(impl, f"{what}, ended at the start", [one], 3.5, 4.0, (2.0, 0.0))
    failed = Request(0.0, 0.0, [(1.0, 5)], 1.5, "failed")
    refused = Request(0.0, 0.0, [], 0.5, "rejected")
    through(impl, f"{what}, failures", [one, failed, refused], 0.0, 4.0, (0.25, 1.75))
    nothing = Request(0.0, 0.0, [], 1.0)
    through(impl, f"{what}, an ok reply without tokens", [nothing], 0.0, 2.0, (0.5, 0.0))
    through(impl, f"{what}, nothing happened", [one], 4.0, 6.0, (0.0, 0.0))
    late = Request(0.0, 2.5, [(3.0, 1)], 3.5)
    through(impl, f"{what}, due before the window", [late], 2.0, 4.0, (0.5, 0.5))


def random_request(draw: random.Random) -> Request:
    """A request with lateness, pauses, empty chunks, and sometimes a failure."""
    due = draw.randint(0, 40) / 8
    sent = due + draw.choice([0, 0, 1, 9]) / 8
    at, chunks = sent, []
    for _ in range(draw.randint(0, 6)):
        at += draw.randint(1, 6) / 16
        chunks.append((at, draw.choice([0, 1, 1, 1, 2, 5])))
    end = at + draw.randint(0, 3) / 16
    outcome = draw.choice(["ok", "ok", "ok", "failed", "rejected"])
    return Request(due, sent, chunks if outcome != "rejected" else [], end, outcome)


@check(2, "Fifty random traces")
def test_random(impl: Any) -> None:
    """Everything at once."""
    for seed in seeds(50):
        draw = random.Random(seed)
        trace = [random_request(draw) for _ in range(draw.randint(1, 12))]
        for request in trace:
            measured(impl, "measures of a random request", request)
        percent = draw.choice([5, 50, 90, 99])
        summed(impl, "The summary of a random trace", trace, percent)
        start = draw.randint(0, 16) / 8
        end = start + draw.randint(1, 32) / 8
        ok = [request for request in trace if request.outcome == "ok"]
        ended = sum(start <= request.end < end for request in ok)
        tokens = sum(n for request in ok for at, n in request.chunks if start <= at < end)
        want = ended / (end - start), tokens / (end - start)
        through(impl, "The throughput of a random trace", trace, start, end, want)
