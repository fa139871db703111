"""The figures of one run as JSON data."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minillm.lab.benchmarks.serving import measures
from minillm.lab.benchmarks.serving.percentiles import statistics
from minillm.lab.benchmarks.serving.reply import FAILURE, OK, REJECTION, Reply
from minillm.lab.benchmarks.serving.slo import Objectives, evaluate
from minillm.lab.benchmarks.serving.window import (
    Window,
    offered_window,
    prompts_within,
    steady_window,
    tokens_within,
)

LEAST_WINDOW = 0.5  # of the run; a shorter steady window says little about the run
MOST_ERRORS = 5  # kinds of errors that are listed


@dataclass(frozen=True)
class Evaluation:
    """How a run is evaluated.

    Attributes:
        objectives: the SLO; empty for none.
        steady_ratio: share of the peak concurrency that counts as steady.
        warmup: conversations at the start that are sent but not evaluated.
    """

    objectives: Objectives
    steady_ratio: float = 0.8
    warmup: int = 0


def summarise(replies: Sequence[Reply], start: float, how: Evaluation) -> dict[str, Any]:
    """All figures of one run; rates are over `wall`, which is from the start (after warm-up: from
    the first evaluated request) to the end of the last reply."""
    kept = [reply for reply in replies if reply.index >= how.warmup]
    if how.warmup and kept:
        start = min(reply.intended for reply in kept)
    wall = max((reply.end for reply in kept), default=start) - start
    counts = Counter(reply.outcome for reply in kept)
    good = [reply for reply in kept if measures.succeeded(reply)]
    offered = offered_window(kept)
    return {
        "sent": len(kept),
        "ok": counts[OK],
        "rejected": counts[REJECTION],
        "failed": counts[FAILURE],
        "errors": dict(errors(kept).most_common(MOST_ERRORS)),
        "wall": wall,
        **tokens(good, wall),
        "offered": rates(kept, offered),
        "steady": steady(kept, wall, how.steady_ratio),
        "lateness": statistics([reply.lateness for reply in kept]),
        "dialects": dialects(kept, wall),
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
    """Tokens and their rates, over the whole run."""
    prompts = sum(reply.prompt_tokens or 0 for reply in good)
    outputs = sum(reply.tokens for reply in good)
    per = 1 / wall if wall > 0 else 0.0
    return {
        "prompt_tokens": prompts,
        "output_tokens": outputs,
        "cached_tokens": sum(reply.cached_tokens or 0 for reply in good),
        "frames": sum(len(reply.frames) for reply in good),
        "without_usage": sum(reply.output_tokens is None for reply in good),
        "request_throughput": len(good) * per,
        "output_throughput": outputs * per,
        "input_throughput": prompts * per,
        "peak_output_throughput": peak(good),
    }


def peak(good: Sequence[Reply]) -> float:
    """The most output tokens that arrived within one second, counted as vLLM does in whole
    seconds."""
    seconds: Counter[int] = Counter()
    first = min((reply.intended for reply in good), default=0.0)
    for reply in good:
        for at in reply.frames:
            seconds[int(at - first)] += 1
    return float(max(seconds.values(), default=0))


def rates(replies: Sequence[Reply], window: Window) -> dict[str, Any] | None:
    """Rates within a window; None if it is empty."""
    length = window[1] - window[0]
    if length <= 0:
        return None
    return {
        "seconds": length,
        # The last request is due at the end of the window, so one fewer fills it.
        "request_rate": (len(replies) - 1) / length,
        "output_throughput": tokens_within(replies, window) / length,
        "input_throughput": prompts_within(replies, window) / length,
    }


def steady(replies: Sequence[Reply], wall: float, ratio: float) -> dict[str, Any]:
    """Rates and latencies within the steady window."""
    window, most = steady_window(replies, ratio)
    length = window[1] - window[0]
    inside = [reply for reply in replies if window[0] <= reply.intended < window[1]]
    values = [measures.vllm(reply) for reply in inside if measures.succeeded(reply)]
    return {
        "ratio": ratio,
        "peak_concurrency": most,
        "seconds": length,
        "share": length / wall if wall > 0 else 0.0,
        "output_throughput": tokens_within(replies, window) / length if length else 0.0,
        "requests": len(inside),
        **{name: statistics([one[name] for one in values]) for name in ("ttft", "tpot", "e2el")},
    }


def dialects(replies: Sequence[Reply], wall: float) -> dict[str, Any]:
    """Statistics of every measure in every dialect. Failed requests have none, except in aiperf's
    ``adj_`` measures, where they are infinite (percentiles that reach them are null)."""
    good = [reply for reply in replies if measures.succeeded(reply)]
    found: dict[str, dict[str, Any]] = {}
    for dialect, measure in measures.DIALECTS.items():
        values = [measure(reply) for reply in good]
        names = values[0] if values else ()
        found[dialect] = {name: statistics([one[name] for one in values]) for name in names}
    if not good:
        return found
    found["vllm"]["itl"] = statistics(pooled([reply.frames for reply in good]))
    found["aiperf"]["inter_chunk_latency"] = statistics(pooled([reply.texts for reply in good]))
    lost = [math.inf] * (len(replies) - len(good))
    for name in ("time_to_first_token", "request_latency"):
        values_of = [measures.aiperf(reply)[name] for reply in good]
        found["aiperf"][f"adj_{name}"] = statistics([*values_of, *lost])
    found["guidellm"]["output_tokens_per_second"] = statistics(
        [reply.tokens / (reply.end - reply.intended) for reply in good]
    )
    return found


def pooled(times: Sequence[list[float]]) -> list[float]:
    """Gaps between frames, of all requests together."""
    return [gap for one in times for gap in measures.gaps(one)]
