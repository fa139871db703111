"""The time between a first token in the engine and at the client, one request at a time.

The engine's trace has the time at which the step of each token had computed it, and the client
notes when it reads the first event. Both use the system's clock of `perf_counter`, which all
processes share.
"""

from collections.abc import Sequence
from statistics import median
from urllib.request import ProxyHandler, build_opener

from minillm.lab.benchmarks.streams_client import events_of, run_streams
from minillm.serving.request_trace import names_of
from minillm.trace.file import read_trace

NEW_TOKENS = 8
SECONDS = 30.0


def first_token_delays(port: int, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Milliseconds of each prompt's first token. The server runs with `--enable-request-trace`."""
    return [delay(port, prompt) for prompt in prompts]


def delay(port: int, prompt: Sequence[int]) -> float:
    """Milliseconds until the client has read the first event."""
    got = run_streams(port, [prompt], NEW_TOKENS, parse=False)
    request_id = events_of(got.replies[0])[0]["id"]
    url = f"http://127.0.0.1:{port}/debug/trace?last={2 * NEW_TOKENS}"
    with build_opener(ProxyHandler({})).open(url, timeout=SECONDS) as reply:
        lines = reply.read().decode().splitlines()
    times = read_trace(lines, url).token_times()
    computed = next(times[name][0] for name in times if request_id in names_of(name))
    return 1000 * (got.start + got.first[0] - computed)


def described(delays: Sequence[float]) -> str:
    """The delays in one sentence."""
    return (
        f"With one request at a time the client has the first token {median(delays):.2f} ms after "
        f"the engine (median of {len(delays)}; at most {max(delays):.2f} ms)."
    )
