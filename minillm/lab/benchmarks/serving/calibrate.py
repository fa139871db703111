"""Calibrates the client against `guidellm mock-server`, whose TTFT and ITL are set.

The mock server sleeps for the set times and then works, so its frames are late themselves. A second
client, a blocking socket without any library, therefore measures the same server. A median is
within tolerance if it differs from the set time, or from that of the socket, by at most 5% or 2 ms,
whichever is more.
"""

import argparse
import asyncio
import json
import math
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from minillm.cli.terminal import Terminal, seconds
from minillm.errors import MinillmError, NodeError
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.lab.benchmarks.serving.arrivals import Arrivals
from minillm.lab.benchmarks.serving.bench import Plan
from minillm.lab.benchmarks.serving.measurement import Wanted, measure
from minillm.lab.benchmarks.serving.percentiles import percentile
from minillm.lab.benchmarks.serving.server_process import free_port, serving
from minillm.lab.benchmarks.serving.workload import parse_workload

RELATIVE, ABSOLUTE = 0.05, 0.002  # tolerance: whichever is more
INPUT, OUTPUT = 16, 32  # tokens
PLAIN = 20  # requests of the plain socket
HEADER = ("TTFT, ITL: median of", "set", "socket", "client", "of set", "as set", "as socket")
CASES = ((0.05, 0.01), (0.2, 0.02), (0.5, 0.05))  # TTFT and ITL in seconds
EXAMPLES = """\
example:
  python -m minillm.lab.benchmarks.serving.calibrate --guidellm ENVIRONMENT/bin/guidellm
"""


@dataclass(frozen=True)
class Compared:
    """A set time, that of the plain socket, and that of the client, in seconds."""

    name: str
    wanted: float
    plain: float
    measured: float

    @property
    def as_set(self) -> bool:
        """Whether the client agrees with the set time."""
        return close(self.measured, self.wanted)

    @property
    def as_plain(self) -> bool:
        """Whether the client agrees with the plain socket."""
        return close(self.measured, self.plain)


def close(measured: float, wanted: float) -> bool:
    """Whether two times agree within the tolerance."""
    return abs(measured - wanted) <= max(RELATIVE * wanted, ABSOLUTE)


def plain_times(port: int, count: int) -> tuple[float, float]:
    """Medians of the first and the last frame of requests, one after the other."""
    body = {"model": "mock", "prompt": " a" * INPUT, "max_tokens": OUTPUT, "stream": True}
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    firsts, lasts = [], []
    for _ in range(count):
        start, received, first = perf_counter(), b"", None
        with socket.create_connection(("127.0.0.1", port), timeout=60) as one:
            one.sendall(head.encode() + data)
            while b"[DONE]" not in received and (chunk := one.recv(65536)):
                received += chunk
                if first is None and b"data:" in received:
                    first = perf_counter() - start
        if first is None:
            raise NodeError("The mock server sent no frame.")
        firsts.append(first)
        lasts.append(perf_counter() - start)
    return percentile(firsts, 50), percentile(lasts, 50)


def times(first: float, last: float) -> dict[str, float]:
    """Measures of a reply whose first and last frame arrive at these times."""
    between = (last - first) / (OUTPUT - 1)
    return {
        "vllm ttft": first,
        "vllm tpot": between,
        "vllm itl": between,
        "vllm e2el": last,
        "aiperf inter_token_latency": between,
        "guidellm time_per_output_token": last / OUTPUT,
    }


def run_case(guidellm: Path, ttft: float, itl: float, rate: float, count: int) -> list[Compared]:
    """Start a mock server with these times, load it, and compare."""
    port = free_port()
    command = [str(guidellm), "mock-server", "--port", str(port), "--model", "mock",
               "--ttft-ms", f"{1e3 * ttft:g}", "--itl-ms", f"{1e3 * itl:g}",
               "--output-tokens", str(OUTPUT)]  # fmt: skip
    workload = parse_workload(f"fixed:input={INPUT},output={OUTPUT}")
    plan = Plan(workload, Arrivals(rate), (rate,), count)
    with serving(command, port) as url:
        plain = times(*plain_times(port, PLAIN))
        found = asyncio.run(measure(Wanted(plan), url, lambda text: None))
    return compared(found, times(ttft, ttft + (OUTPUT - 1) * itl), plain)


def compared(
    found: Mapping[str, Any], wanted: Mapping[str, float], plain: Mapping[str, float]
) -> list[Compared]:
    """The medians of one run beside the others."""
    dialects = found["runs"][0]["summary"]["dialects"]
    pairs = [(name, *name.split()) for name in wanted]
    return [
        Compared(name, wanted[name], plain[name], dialects[dialect][measure]["p50"])
        for name, dialect, measure in pairs
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison; exit code 1 if a figure is out of tolerance."""
    parser = benchmark_parser("serving.calibrate", __doc__, EXAMPLES)
    parser.add_argument("--guidellm", type=Path, required=True, help="the guidellm program")
    parser.add_argument("--request-rate", type=rate_of, default=4.0, help="requests/s (4)")
    parser.add_argument("--requests", type=int, default=60, help="requests of a case (60)")
    args, terminal = parser.parse_args(argv), Terminal()
    rows, results = [], []
    for ttft, itl in CASES:
        for one in run_case(args.guidellm, ttft, itl, args.request_rate, args.requests):
            cells = [seconds(time) for time in (one.wanted, one.plain, one.measured)]
            verdict = ["yes" if each else "no" for each in (one.as_set, one.as_plain)]
            label = f"{seconds(ttft)}, {seconds(itl)}: {one.name}"
            rows.append([label, *cells, f"{one.measured / one.wanted:.3f}", *verdict])
            results.append({"case": [ttft, itl], "name": one.name, "set": one.wanted,
                            "plain": one.plain, "measured": one.measured, "as_set": one.as_set,
                            "as_plain": one.as_plain})  # fmt: skip
    terminal.table(HEADER, rows)
    good = all(one["as_set"] or one["as_plain"] for one in results)
    if args.json is not None:
        write_result({"benchmark": "calibrate", "results": results}, args.json, terminal)
    return 0 if good else 1


def rate_of(text: str) -> float:
    """A finite rate above 0."""
    rate = float(text)
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no rate above 0")
    return rate


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MinillmError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
