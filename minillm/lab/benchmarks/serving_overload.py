"""Overload of the HTTP server: goodput, attainment and rejections at 1 and 3 times its capacity.

Capacity is the rate of a closed loop with as many clients as the batch has places. Then requests
arrive as a Poisson process. A request is good if it succeeds with its time to first token and its
time per output token within the SLO. The server is a process of its own.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.lab.benchmarks.serving.server_process import free_port, serve_command, serving

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.serving_overload --seconds 30
"""
PLACES = 16  # of the batch, and of the queue
TOKENS = 32
BODY: Mapping[str, object] = MappingProxyType(
    {"prompt": "def fib(n):", "max_tokens": TOKENS, "ignore_eos": True}
    | {"temperature": 0, "stream": True}
)


@dataclass
class Sample:
    """One request; times in seconds from its planned start."""

    status: int
    first: float
    end: float

    def good(self, ttft: float, tpot: float) -> bool:
        """Whether the request succeeded within the SLO."""
        per_token = (self.end - self.first) / (TOKENS - 1)
        return self.status == 200 and self.first <= ttft and per_token <= tpot


@dataclass
class Row:
    """The figures of one load."""

    load: str
    requests: int
    rejected: int
    failed: int
    goodput: float  # good requests per second
    attainment_of_accepted: float
    rejection_p99_ms: float
    ttft_p99_ms: float  # of accepted requests


async def send(port: int, planned: float) -> Sample:
    """Send one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(dict(BODY)).encode()
    writer.write(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    got, first = b"", 0.0
    while part := await reader.read(65536):
        got += part
        if not first and b"data: {" in got:
            first = time.perf_counter() - planned
    writer.close()
    done = b"[DONE]" in got and b'"error"' not in got
    status = int(got[9:12]) if got else 0
    return Sample(status if status != 200 or done else 0, first, time.perf_counter() - planned)


async def closed(port: int, seconds: float) -> list[Sample]:
    """`PLACES` clients, each of which sends its next request when the last one has ended."""
    end, samples = time.perf_counter() + seconds, list[Sample]()

    async def client() -> None:
        while time.perf_counter() < end:
            samples.append(await send(port, time.perf_counter()))

    await asyncio.gather(*(client() for _ in range(PLACES)))
    return samples


async def opened(port: int, rate: float, seconds: float, seed: int) -> list[Sample]:
    """A Poisson process of requests; a late start counts from its planned time."""
    rng, tasks = random.Random(seed), list[asyncio.Task[Sample]]()
    planned, end = time.perf_counter(), time.perf_counter() + seconds
    while (planned := planned + rng.expovariate(rate)) < end:
        await asyncio.sleep(max(planned - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(send(port, planned)))
    return list(await asyncio.gather(*tasks))


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; 0 without values."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def row(load: str, samples: Sequence[Sample], seconds: float, slo: tuple[float, float]) -> Row:
    """The figures of one load."""
    accepted = [each for each in samples if each.status == 200]
    refused = [each for each in samples if each.status in (429, 503)]
    good = sum(each.good(*slo) for each in samples)
    return Row(
        load,
        len(samples),
        len(refused),
        len(samples) - len(accepted) - len(refused),
        round(good / seconds, 2),
        round(good / max(len(accepted), 1), 4),
        round(1000 * percentile([each.end for each in refused], 0.99), 1),
        round(1000 * percentile([each.first for each in accepted], 0.99), 1),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print one row per load."""
    parser = benchmark_parser("serving_overload", __doc__, EXAMPLES)
    parser.add_argument("--seconds", type=float, default=30.0, help="time of each load (30)")
    parser.add_argument("--model", default="tiny", help="model (tiny)")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    port = free_port()
    options = ["--max-num-seqs", str(PLACES), "--max-waiting", str(PLACES), "--disable-log-stats"]
    rows: list[Row] = []
    with serving(serve_command(chosen.model, port, options), port):
        asyncio.run(closed(port, 2))  # warm-up
        samples = asyncio.run(closed(port, chosen.seconds))
        capacity = len(samples) / chosen.seconds
        # Twice the closed loop's p99 of each, plus the wait of one full batch in the queue.
        whole = percentile([each.end for each in samples], 0.99)
        first = percentile([each.first for each in samples], 0.99)
        per_token = percentile([(s.end - s.first) / (TOKENS - 1) for s in samples], 0.99)
        slo = (2 * first + 2 * whole, 2 * per_token)
        rows.append(row("closed loop", samples, chosen.seconds, slo))
        for factor in (0.5, 0.8, 1.0, 3.0):
            made = asyncio.run(opened(port, factor * capacity, chosen.seconds, seed=1))
            rows.append(row(f"{factor:g}x capacity", made, chosen.seconds, slo))
    terminal.heading(f"Capacity {capacity:.1f} requests/s; SLO: TTFT {1000 * slo[0]:.0f} ms, "
                     f"TPOT {1000 * slo[1]:.1f} ms")  # fmt: skip
    names = list(asdict(rows[0]))
    terminal.table(names, [[str(each) for each in asdict(one).values()] for one in rows])
    best = max(each.goodput for each in rows[1:])
    terminal.paragraph(f"Goodput at 3x is {rows[-1].goodput / max(best, 1e-9):.0%} of the peak's.")
    result = {"benchmark": "serving_overload", "capacity": capacity, "slo": slo}
    write_result({**result, "rows": [asdict(each) for each in rows]}, chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
