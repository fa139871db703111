"""Leak test of the HTTP server: hundreds of concurrent streams, of which many are abandoned.

The server runs in this process over a real socket. Clients finish, leave at a random moment, read
slowly, or end as a killed process does. What a client has received is compared with `LLM.generate`.
At the end no block, request or task of the server may be left, and memory must be flat: over the
last half of the run it may grow by at most `MOST_GROWTH` per 1,000 requests.
"""

import asyncio
import gc
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import linear_regression

from minillm.api.arguments import AsyncEngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.lab.benchmarks.soak_oracle import require, resident_bytes
from minillm.llm import LLM
from minillm.scheduling.data_parallel import schedulers_of
from minillm.serving.address import bound_socket
from minillm.serving.app import build_app
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.serving.server import HttpServer
from minillm.serving.settings import Settings
from minillm.trace.recorder import size_of

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.serving_soak --minutes 10
  python -m minillm.lab.benchmarks.serving_soak --minutes 1 --streams 100 --json FILE
"""
MOST_GROWTH = 500_000  # bytes per 1,000 requests, over the last half of the parts
PARTS = 8
PATIENCE = 600.0  # seconds for the last requests of a part, on a busy machine
KINDS = ("finish", "leave", "slow", "killed", "whole")
PROMPTS = (
    "def fib(n):",
    "import numpy as np\n",
    "class Tree:\n",
    "for i in range(",
    "# sort a list\n",
)
LINGER = b"\x01\x00\x00\x00\x00\x00\x00\x00"  # close with a reset, as the system does for a kill


@dataclass
class Result:
    """The result of a run. `rss` has one figure per part of the run, when idle and with an empty
    trace; `trace` is what the trace's records took before, by its own count; `requests` is the
    number of requests until then."""

    streams: int
    seconds: float = 0.0
    outcomes: dict[str, int] = field(default_factory=dict)
    characters: int = 0
    requests: list[int] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    trace: list[int] = field(default_factory=list)
    tasks: list[int] = field(default_factory=list)

    @property
    def growth(self) -> float:
        """Bytes per 1,000 requests: the slope of a line through the last half of the parts."""
        half = len(self.rss) // 2
        requests, rss = self.requests[half:], self.rss[half:]
        return 1000 * linear_regression(requests, rss).slope if len(rss) > 1 else 0.0


class ServingSoak:
    """A server, and clients that start again until the time is over."""

    def __init__(self, model: str, streams: int, seed: int = 0):
        options = {"dtype": "float32", "deterministic": True, "max_model_len": 128}
        llm = LLM(model, **options)
        params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        outputs = llm.generate(list(PROMPTS), params)
        self.right = {
            prompt: each.outputs[0].text for prompt, each in zip(PROMPTS, outputs, strict=True)
        }
        llm.close()
        self.engine = AsyncLLMEngine(
            AsyncEngineArgs(model, max_num_seqs=64, disable_log_stats=True, **options)  # type: ignore[arg-type]
        )
        self.app = build_app(self.engine, Settings(names=("soak",), max_waiting=streams))
        self.rng, self.streams, self.outcomes = random.Random(seed), streams, Counter[str]()
        self.result = Result(streams)
        self.listening = bound_socket("127.0.0.1", 0)
        self.address = self.listening.getsockname()

    def run(self, seconds: float, parts: int = PARTS) -> Result:
        """Run for a time, in parts, and check that nothing is left after each."""
        ready, ended = threading.Event(), threading.Event()
        server = Quiet(self.app, 5.0, ready.set)
        loops: list[asyncio.AbstractEventLoop] = []

        async def serve() -> None:
            loops.append(asyncio.get_running_loop())
            await server.serve(sockets=[self.listening])
            ended.set()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        ready.wait()
        begin = time.perf_counter()
        try:
            for _ in range(parts):
                asyncio.run(self._clients(seconds / parts))
                self._check_idle(loops[0])
        finally:
            server.should_exit = True
            ended.wait(30)
            self.engine.shutdown()
            self.listening.close()
        self.result.seconds = time.perf_counter() - begin
        self.result.outcomes = dict(sorted(self.outcomes.items()))
        return self.result

    async def _clients(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        async with asyncio.timeout(seconds + PATIENCE):
            await asyncio.gather(*(self._client(end) for _ in range(self.streams)))

    async def _client(self, end: float) -> None:
        await asyncio.sleep(self.rng.random())
        while time.monotonic() < end:
            await self._request(self.rng.choice(KINDS), self.rng.choice(PROMPTS))

    async def _request(self, kind: str, prompt: str) -> None:
        reader, writer = await asyncio.open_connection(*self.address[:2], limit=4096)
        body = json.dumps(
            {"prompt": prompt, "temperature": 0, "max_tokens": 48, "ignore_eos": True,
             "stream": kind != "whole"}
        ).encode()  # fmt: skip
        head = f"POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        got, most = b"", self.rng.randrange(4000)
        try:
            while part := await reader.read(512 if kind == "slow" else 65536):
                got += part
                if kind in ("leave", "killed") and len(got) > most:
                    break
                if kind == "slow":
                    await asyncio.sleep(0.01)
        finally:
            if kind == "killed":
                raw = writer.get_extra_info("socket")
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER)
            writer.close()
        self._check(kind, prompt, got)

    def _check(self, kind: str, prompt: str, got: bytes) -> None:
        status, right = got[9:12], self.right[prompt]
        self.outcomes[f"{kind}, {status.decode() or 'no reply'}"] += 1
        data = without_chunks(got)
        if status != b"200":
            require(kind in ("leave", "killed") or status == b"503", "status", got[:300])
            return
        if kind == "whole":
            text, whole = json.loads(data)["choices"][0]["text"], True
        else:
            frames = data.split(b"\n\n")[:-1]
            whole = bool(frames) and frames[-1] == b"data: [DONE]"
            events = [json.loads(each[6:]) for each in frames if each.startswith(b"data: {")]
            require(not any("error" in each for each in events), "an error:", data[-300:])
            text = "".join(each["choices"][0]["text"] for each in events)
        require(right.startswith(text), "another text:", repr(text), "not", repr(right))
        require(whole or kind in ("leave", "killed"), "cut off:", data[-300:])
        require(not whole or text == right, "a shorter text:", repr(text))
        self.result.characters += len(text)

    def _check_idle(self, loop: asyncio.AbstractEventLoop) -> None:
        gate, end = self.app.state.server.gate, time.monotonic() + 30
        while gate.num_open or self.engine.num_unfinished:
            require(time.monotonic() < end, gate.num_open, "sequences are left")
            time.sleep(0.05)
        time.sleep(0.5)  # connections that are being closed
        pool = schedulers_of(self.engine._engine.scheduler)[0].blocks.pool
        require(pool.num_free == pool.num_blocks, pool.num_blocks - pool.num_free, "blocks left")
        self.result.trace.append(sum(map(size_of, self.engine._engine.trace)))
        self.engine._engine.trace.clear()  # its records may take 35 MB, which is no leak
        tasks = len(asyncio.all_tasks(loop))
        require(tasks <= 4, tasks, "tasks are left:", asyncio.all_tasks(loop))
        gc.collect()
        self.result.tasks.append(tasks)
        self.result.requests.append(sum(self.outcomes.values()))
        self.result.rss.append(resident_bytes())


def without_chunks(reply: bytes) -> bytes:
    """The body of a reply, of which the last chunk may be incomplete."""
    head, _, rest = reply.partition(b"\r\n\r\n")
    if b"chunked" not in head.lower():
        return rest
    body = b""
    while b"\r\n" in rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    return body


class Quiet(HttpServer):
    """A server in a thread, where signals cannot be handled."""

    capture_signals = None  # type: ignore[assignment]

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve without handling signals."""
        await self._serve(sockets)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the soak, and print what happened."""
    parser = benchmark_parser("serving_soak", __doc__, EXAMPLES)
    parser.add_argument("--minutes", type=float, default=10.0, help="time (10)")
    parser.add_argument("--streams", type=int, default=500, help="concurrent clients (500)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    soak = ServingSoak("tiny", chosen.streams, chosen.seed)
    result = soak.run(60 * chosen.minutes)
    terminal.heading("Soak of the server: every block came back, and no task remains")
    terminal.table(
        ["kind and status", "requests"],
        [[name, f"{count:,}"] for name, count in result.outcomes.items()],
    )
    terminal.paragraph(
        f"{result.characters:,} characters were equal to those of LLM.generate. At the end of each "
        f"part memory was {', '.join(f'{each / 1e6:.1f}' for each in result.rss)} MB; over "
        f"the last half it grew by {result.growth / 1000:,.0f} kB per 1,000 requests "
        f"(at most {MOST_GROWTH // 1000:,})."
    )
    require(result.growth <= MOST_GROWTH, "memory grows:", result.growth, result.rss)
    write_result(
        {"benchmark": "serving_soak", **asdict(result), "growth": result.growth},
        chosen.json,
        terminal,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
