"""Latencies of one request, as the common load generators define them.

Their names mean different things, so every figure is reported with its dialect:

* **vllm** (``vllm bench serve``): TTFT and E2EL end at the first and last frame that has choices,
  with or without text. TPOT = (E2EL - TTFT) / (O - 1), for O > 1 output tokens.
* **aiperf** (successor of genai-perf): frames with text only. Its inter_token_latency is the TPOT
  of vLLM; gaps between frames are inter_chunk_latency.
* **guidellm**: frames with text only. Its time_per_output_token = (last - start) / O includes the
  TTFT; its inter_token_latency does not. request_latency ends when the stream has ended.

The tools begin when they send the request, and leave out how late that was. Here all measures begin
when the request was due (`Reply.intended`), so they are larger by `Reply.lateness`.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

from minillm.lab.benchmarks.serving.reply import OK, Reply

Values = dict[str, float | None]  # None where the measure is not defined


def vllm(reply: Reply) -> Values:
    """Measures of ``vllm bench serve``, in seconds."""
    start, frames, tokens = reply.intended, reply.frames, reply.tokens
    if not frames:
        return dict.fromkeys(("ttft", "tpot", "e2el"))
    ttft, e2el = frames[0] - start, frames[-1] - start
    tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else None
    return {"ttft": ttft, "tpot": tpot, "e2el": e2el}


def aiperf(reply: Reply) -> Values:
    """Measures of aiperf, in seconds, and tokens per second of one user."""
    start, texts, tokens = reply.intended, reply.texts, reply.tokens
    if not texts:
        return dict.fromkeys(
            ("time_to_first_token", "time_to_second_token", "inter_token_latency",
             "request_latency", "output_token_throughput_per_user")
        )  # fmt: skip
    ttft, latency = texts[0] - start, texts[-1] - start
    between = (latency - ttft) / (tokens - 1) if tokens > 1 else None
    return {
        "time_to_first_token": ttft,
        "time_to_second_token": texts[1] - texts[0] if len(texts) > 1 else None,
        "inter_token_latency": between,
        "request_latency": latency,
        "output_token_throughput_per_user": 1 / between if between else None,
    }


def guidellm(reply: Reply) -> Values:
    """Measures of guidellm, in seconds."""
    start, texts, tokens = reply.intended, reply.texts, reply.tokens
    if not texts or not tokens:
        return dict.fromkeys(
            ("time_to_first_token", "inter_token_latency", "time_per_output_token",
             "request_latency")
        )  # fmt: skip
    return {
        "time_to_first_token": texts[0] - start,
        "inter_token_latency": (texts[-1] - texts[0]) / (tokens - 1) if tokens > 1 else None,
        "time_per_output_token": (texts[-1] - start) / tokens,
        "request_latency": reply.end - start,
    }


DIALECTS: Mapping[str, Callable[[Reply], Values]] = MappingProxyType(
    {"vllm": vllm, "aiperf": aiperf, "guidellm": guidellm}
)


def gaps(times: list[float]) -> list[float]:
    """Times between frames. Those of all requests together are vLLM's ITL (all frames) or aiperf's
    inter_chunk_latency (frames with text)."""
    return [later - earlier for earlier, later in pairwise(times)]


def succeeded(reply: Reply) -> bool:
    """Whether the reply is complete."""
    return reply.outcome == OK
