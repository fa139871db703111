"""The figures of one run as JSON data."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from minillm.lab.benchmarks.serving import measures
from minillm.lab.benchmarks.serving.percentiles import statistics
from minillm.lab.benchmarks.serving.reply import FAILURE, OK, REJECTION, Reply
from minillm.lab.benchmarks.serving.slo import Objectives, evaluate

MOST_ERRORS = 5  # kinds of errors that are listed
Window = tuple[float, float]  # start and end, on the clock of the replies


@dataclass(frozen=True)
class Evaluation:
    """How a run is evaluated.

    Attributes:
        objectives: the SLO; empty for none.
        warmup: conversations at the start that are sent but not evaluated.
    """

    objectives: Objectives
    warmup: int = 0


def summarise(replies: Sequence[Reply], start: float, how: Evaluation) -> dict[str, Any]:
    """All figures of one run; rates are over `wall`, which is from the start (after warm-up: from
    the first evaluated request) to the end of the last reply."""
    kept = [reply for reply in replies if reply.index >= how.warmup]
    if how.warmup and kept:
        start = min(reply.intended for reply in kept)
    wall = max((reply.end for reply in kept), default=start) - start
    counts = Counter(reply.outcome for reply in kept)
    return {
        "sent": len(kept),
        "ok": counts[OK],
        "rejected": counts[REJECTION],
        "failed": counts[FAILURE],
        "errors": dict(errors(kept).most_common(MOST_ERRORS)),
        "wall": wall,
        **tokens([reply for reply in kept if measures.succeeded(reply)], wall),
        "offered": offered(kept),
        "peak_concurrency": peak_concurrency(kept),
        "lateness": statistics([reply.lateness for reply in kept]),
        "latencies": latencies(kept),
        "slo": evaluate(kept, how.objectives, wall) if how.objectives else None,
    }


def errors(replies: Sequence[Reply]) -> "Counter[str]":
    """How often each error occurred."""
    return Counter(
        f"{reply.status}: {reply.error}" if reply.status not in (None, 200) else str(reply.error)
        for reply in replies
        if reply.error is not None
    )


def tokens(good: Sequence[Reply], wall: float) -> dict[str, Any]:
    """Tokens and their rates, over the whole run. The peak is of whole seconds, as in vLLM."""
    prompts = sum(reply.prompt_tokens or 0 for reply in good)
    outputs = sum(reply.tokens for reply in good)
    per = 1 / wall if wall > 0 else 0.0
    first = min((reply.intended for reply in good), default=0.0)
    seconds = Counter(int(at - first) for reply in good for at in reply.frames)
    return {
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "cached_tokens": sum(reply.cached_tokens or 0 for reply in good),
        "frames": sum(len(reply.frames) for reply in good),
        "without_usage": sum(reply.output_tokens is None for reply in good),
        "request_throughput": len(good) * per,
        "output_throughput": outputs * per,
        "input_throughput": prompts * per,
        "peak_output_throughput": float(max(seconds.values(), default=0)),
    }


def latencies(replies: Sequence[Reply]) -> dict[str, Any]:
    """Statistics of every measure; failed requests have none."""
    good = [reply for reply in replies if measures.succeeded(reply)]
    values = [measures.vllm(reply) for reply in good]
    found = {name: statistics([one[name] for one in values]) for name in ("ttft", "tpot", "e2el")}
    return found | {"itl": statistics([gap for one in good for gap in measures.gaps(one.frames)])}


def offered(replies: Sequence[Reply]) -> dict[str, Any] | None:
    """Rates from the first to the last time at which a request was due; None if all were due at
    once."""
    due = [reply.intended for reply in replies]
    window = min(due, default=0.0), max(due, default=0.0)
    length = window[1] - window[0]
    if length <= 0:
        return None
    return {
        "seconds": length,
        # The last request is due at the end of the window, so one fewer fills it.
        "request_rate": (len(replies) - 1) / length,
        "output_throughput": tokens_within(replies, window) / length,
    }


def peak_concurrency(replies: Sequence[Reply]) -> int:
    """The most requests in flight at once."""
    changes: Counter[float] = Counter()
    for reply in replies:
        changes[reply.sent] += 1
        changes[reply.end] -= 1
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


def tokens_within(replies: Sequence[Reply], window: Window) -> float:
    """Output tokens that arrived within a window. Every frame of a request has the same share of
    its tokens, because frames may hold several tokens."""
    return sum(
        reply.tokens * sum(window[0] <= at < window[1] for at in reply.frames) / len(reply.frames)
        for reply in replies
        if measures.succeeded(reply)
    )
