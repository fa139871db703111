"""Latencies of one request, as ``vllm bench serve`` defines them.

TTFT and E2EL end at the first and last frame that has choices, with or without text.
TPOT = (E2EL - TTFT) / (O - 1), for O > 1 output tokens. ITL is every gap between frames, of all
requests together. vLLM's tool begins when it sends the request, and leaves out how late that was.
Here all measures begin when the request was due (`Reply.intended`), so they are larger by
`Reply.lateness`.
"""

from itertools import pairwise

from minillm.lab.benchmarks.serving.reply import OK, Reply


def vllm(reply: Reply) -> dict[str, float | None]:
    """``ttft``, ``tpot`` and ``e2el`` in seconds; None where the measure is not defined."""
    start, frames, tokens = reply.intended, reply.frames, reply.tokens
    if not frames:
        return dict.fromkeys(("ttft", "tpot", "e2el"))
    ttft, e2el = frames[0] - start, frames[-1] - start
    tpot = (e2el - ttft) / (tokens - 1) if tokens > 1 else None
    return {"ttft": ttft, "tpot": tpot, "e2el": e2el}


def gaps(times: list[float]) -> list[float]:
    """Times between frames."""
    return [later - earlier for earlier, later in pairwise(times)]


def succeeded(reply: Reply) -> bool:
    """Whether the reply is complete."""
    return reply.outcome == OK
