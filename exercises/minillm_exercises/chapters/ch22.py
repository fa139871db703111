"""Chapter 22: a real server and its load, and replies of simulated servers.

`LocalServer` runs `minillm serve` in a process of its own, `closed_loop` and `open_loop` load it,
and `crowd` offers more than it accepts. All of them give the `Reply` of `minillm bench serve`, and
so do the simulated servers, so that the engine's own measures are used for both.
"""

import asyncio
import atexit
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from minillm.lab.benchmarks.serving.client import Client, Fields
from minillm.lab.benchmarks.serving.measures import vllm
from minillm.lab.benchmarks.serving.percentiles import percentile
from minillm.lab.benchmarks.serving.reply import REJECTION, Reply
from minillm.lab.benchmarks.serving.runner import Load, Progress, offer
from minillm.lab.benchmarks.serving.server_process import last_line
from minillm.lab.benchmarks.serving.target import session
from minillm.lab.benchmarks.serving.workload import Conversation, Turn
from minillm_exercises.chapters.common import show_table as show_table
from minillm_exercises.errors import ExerciseError

T = TypeVar("T")
START_SECONDS, STOP_SECONDS = 120.0, 15.0
LISTENING = re.compile(r"Listening on (http://\S+)")
PATH = "/v1/completions"
TRIES = 100  # of a request that is refused, ten in a second


class LocalServer:
    """`minillm serve` with `options`, on a free port of this computer, until `close`.

    The server also ends when this process ends, or the `with` block around it.

    Raises:
        ExerciseError: it did not start, with the last line that it wrote.
    """

    def __init__(self, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="minillm-22-")
        log = Path(self._folder.name, "log")
        command = [sys.executable, "-m", "minillm_exercises.chapters.ch22_server", *options]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
            )
        atexit.register(self.close)
        self.url = self._wait(log)

    def _wait(self, log: Path) -> str:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := LISTENING.search(log.read_text("utf-8", "replace")):
                return found[1]
            time.sleep(0.05)
        said = last_line(log)
        self.close()
        raise ExerciseError(f"The server did not start: {said}")

    def close(self) -> None:
        """End the server; nothing happens if it has ended."""
        atexit.unregister(self.close)
        if self.process.stdin:
            self.process.stdin.close()  # which is its sign to stop
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._folder.cleanup()

    def __enter__(self) -> "LocalServer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def in_thread(work: Callable[[], Awaitable[T]]) -> T:
    """The result of a coroutine, run in a thread, because a notebook's own thread has an event loop
    that runs already."""
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work()))  # type: ignore[arg-type]
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def bodies_of(count: int, tokens: int) -> list[bytes]:
    """Requests with different prompts, each for exactly `tokens` tokens."""
    fields = Fields("tiny", chat=False)
    return [fields.body(f"def task_{number}(items):\n", tokens) for number in range(count)]


def load(url: str, count: int, how: Load, tokens: int) -> list[Reply]:
    """Send `count` requests as `how` says; the replies in the order of the requests."""
    bodies = bodies_of(count, tokens)

    async def work() -> list[Reply]:
        async with session() as http:
            client = Client(http, url, 120.0, {})

            async def send(reply: Reply, conversation: Conversation, texts: list[str]) -> None:
                await client.send(reply, PATH, bodies[reply.index])

            turns: list[Conversation] = [(Turn((), tokens),)] * count
            return (await offer(turns, how, send, Progress(count)))[1]

    return in_thread(work)


def closed_loop(url: str, count: int, clients: int, tokens: int = 40) -> list[Reply]:
    """`clients` that each send a request when their previous one is answered."""
    return load(url, count, Load(None, clients), tokens)


def open_loop(url: str, count: int, rate: float, tokens: int = 40) -> list[Reply]:
    """Requests that are due every 1 / rate seconds, whatever has been answered."""
    return load(url, count, Load([number / rate for number in range(count)]), tokens)


def crowd(url: str, count: int, accepted: int, tokens: int = 1900) -> tuple[int, list[Reply]]:
    """Send `count` long requests at once, to a server that accepts so many of them.

    Returns how many were still running when all others had been refused, and the refusals. The
    running ones are then given up; the server notices that their clients are gone.
    """

    async def work() -> tuple[int, list[Reply]]:
        loop = asyncio.get_running_loop()
        async with session() as http:
            client = Client(http, url, 120.0, {})
            replies = [Reply(number, 0, loop.time()) for number in range(count)]
            tasks = {
                asyncio.create_task(client.send(reply, PATH, body))
                for reply, body in zip(replies, bodies_of(count, tokens), strict=True)
            }
            waiting = tasks
            while len(waiting) > accepted:
                _, waiting = await asyncio.wait(
                    waiting, timeout=60.0, return_when=asyncio.FIRST_COMPLETED
                )
            for task in waiting:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            ended = [reply for reply in replies if reply.status is not None and reply.end]
            return len(waiting), ended

    return in_thread(work)


def complete(url: str, prompt: str, tokens: int) -> str:
    """The text of one request; while the server refuses it, it is sent again."""

    async def work() -> str:
        body = Fields("tiny", chat=False).body(prompt, tokens)
        async with session() as http:
            client = Client(http, url, 120.0, {})
            for _ in range(TRIES):
                reply = Reply(0, 0, asyncio.get_running_loop().time())
                await client.send(reply, PATH, body)
                if reply.outcome != REJECTION:
                    return reply.error or reply.text
                await asyncio.sleep(0.1)
        raise ExerciseError(f"The server refused a request {TRIES} times.")

    return in_thread(work)


# ---- replies of simulated servers ----------------------------------------------------------


def answered(index: int, due: float, times: Sequence[float], tokens: int) -> Reply:
    """A reply whose frames came at these times (all of them, or the first and the last)."""
    return Reply(
        index, 0, due, due, times[-1], 200, None, list(times), list(times),
        output_tokens=tokens, finish_reason="length",
    )  # fmt: skip


def refused(index: int, due: float) -> Reply:
    """A reply of a server that accepts no more."""
    return Reply(index, 0, due, due, due, 503, "The server is overloaded.")


def values(replies: Sequence[Reply], name: str) -> list[float]:
    """One measure of the replies that have it, in vLLM's dialect, in milliseconds."""
    found = (vllm(reply)[name] for reply in replies)
    return [1e3 * value for value in found if value is not None]


def p(replies: Sequence[Reply], name: str, percent: float) -> float:
    """The percentile of one measure, in milliseconds."""
    return percentile(values(replies, name), percent)


def most_at_once(replies: Sequence[Reply]) -> int:
    """The most requests that were unanswered at one moment."""
    moments = [(reply.sent, 1) for reply in replies] + [(reply.end, -1) for reply in replies]
    now = most = 0
    for _, change in sorted(moments):
        now += change
        most = max(most, now)
    return most


def rate_of(replies: Sequence[Reply]) -> float:
    """Requests answered per second, from the first one sent to the last one answered."""
    return len(replies) / (max(r.end for r in replies) - min(r.sent for r in replies))


def aiperf(reply: Reply) -> dict[str, float | None]:
    """Measures of aiperf (successor of genai-perf) in seconds: frames with text only. Its
    inter_token_latency has the formula of vLLM's TPOT."""
    start, texts, tokens = reply.intended, reply.texts, reply.tokens
    between = (texts[-1] - texts[0]) / (tokens - 1) if tokens > 1 else None
    return {"time_to_first_token": texts[0] - start, "inter_token_latency": between}


def guidellm(reply: Reply) -> dict[str, float | None]:
    """Measures of guidellm in seconds: frames with text only. Its time_per_output_token includes
    the time to the first token."""
    start, texts = reply.intended, reply.texts
    per_token = (texts[-1] - start) / reply.tokens
    return {"time_to_first_token": texts[0] - start, "time_per_output_token": per_token}


# What each tool measures, and its names of the time until the first token and of that per token.
TOOLS: Mapping[str, tuple[Callable[[Reply], dict[str, float | None]], str, str]] = {
    "vllm": (vllm, "ttft", "tpot"),
    "aiperf": (aiperf, "time_to_first_token", "inter_token_latency"),
    "guidellm": (guidellm, "time_to_first_token", "time_per_output_token"),
}


def by_tool(reply: Reply, start: float) -> dict[str, tuple[float, float]]:
    """The two times of `TOOLS` by each tool's definition, in seconds from `start`. The tools start
    when they send; the engine's measures, when the request was due."""
    moved, found = replace(reply, intended=start), {}
    for tool, (measure, first, per_token) in TOOLS.items():
        times = measure(moved)
        found[tool] = (times[first] or 0.0, times[per_token] or 0.0)
    return found


def show_tools(reply: Reply) -> None:
    """Show what each tool reports under which name, and the same times from when it was due."""
    due, rows = by_tool(reply, reply.intended), []
    for tool, times in by_tool(reply, reply.sent).items():
        named = zip(TOOLS[tool][1:], times, strict=True)
        cells = [f"`{name}` {1e3 * seconds:.0f}" for name, seconds in named]
        rows.append([tool, *cells, *(f"{1e3 * seconds:.0f}" for seconds in due[tool])])
    heads = ["first token (ms)", "per token (ms)", "first, from due", "per token, from due"]
    show_table(["tool", *heads], rows)
