"""Many concurrent streams over HTTP against `LLM.generate` with the same requests.

The server, the engine of `LLM.generate` and the client are three processes, and
the first two run in turn. Rows of the table:

  tokens/s     new tokens per second, median of the runs
  us/token     time of a thread on a processor, in microseconds per token
  waiting      time in which the thread was ready and had no processor
  blocked      other time: the step thread waited for the interpreter or for
               the C workers

Other programs disturb tokens/s much and us/token little. The client only counts
what it receives; with --parse it parses every event, as a typical client does.

A few texts of a run may differ: requests arrive one after the other at the
server, so their prompts are cut into other chunks, and bfloat16 arithmetic then
chooses differently between two logits that are equal or neighbours.
"""

import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from statistics import median
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks.checkpoint import cache_folder, checkpoint_of
from minillm.lab.benchmarks.engine_process import OWN, EngineProcess, environment
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.lab.benchmarks.serving.server_process import (
    free_port,
    serve_command,
    server_process,
)
from minillm.lab.benchmarks.streams_client import run_streams
from minillm.lab.benchmarks.streams_first_token import described, first_token_delays
from minillm.lab.benchmarks.thread_times import STEPS, Times, thread_times
from minillm.plan.machine import cpu_count

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.serving_streams
  python -m minillm.lab.benchmarks.serving_streams --model 135m --repeats 9
  python -m minillm.lab.benchmarks.serving_streams --parse --json streams.json
  python -m minillm.lab.benchmarks.serving_streams --event-rate 1e9
"""
FIRST_ID = 10  # the ids before it may be special tokens
LAST_ID = 4_000
LOOP = "event loop"
SINGLES = 32  # requests one at a time, for the delay of the first token


@dataclass
class Run:
    """One run of all requests."""

    tokens_per_second: float
    times: Times
    client: float = 0.0  # processor seconds
    events: int = 0
    kib: float = 0.0  # received by the client
    first_token_ms: float = 0.0  # mean over the requests


@dataclass(frozen=True)
class Pair:
    """The two runs of one repeat, and how many of their texts are equal."""

    offline: Run
    served: Run
    equal_texts: int

    @property
    def ratio(self) -> float:
        """Tokens per second of the server, relative to `LLM.generate`."""
        return self.served.tokens_per_second / self.offline.tokens_per_second


@dataclass(frozen=True)
class Work:
    """The requests of each run."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    parse: bool

    def prompts(self, seed: int) -> list[list[int]]:
        """Random prompts; each repeat has others, so that the prefix cache has no hits."""
        rng = random.Random(seed)
        sizes = range(self.prompt_tokens)
        return [[rng.randint(FIRST_ID, LAST_ID) for _ in sizes] for _ in range(self.streams)]

    @property
    def tokens(self) -> int:
        """New tokens of a run."""
        return self.streams * self.new_tokens


def offline_run(
    engine: EngineProcess, work: Work, prompts: list[list[int]]
) -> tuple[Run, list[str]]:
    """`LLM.generate` with all requests."""
    before = thread_times(engine.group, STEPS)
    answer = engine.ask({"prompts": prompts, "new_tokens": work.new_tokens})
    times = thread_times(engine.group, STEPS) - before
    return Run(work.tokens / answer["seconds"], times), answer["texts"]


def served_run(
    port: int, server: int, work: Work, prompts: list[list[int]]
) -> tuple[Run, list[str]]:
    """All requests as streams over HTTP."""
    before, start = thread_times(server, LOOP), time.process_time()
    got = run_streams(port, prompts, work.new_tokens, work.parse)
    client, times = time.process_time() - start, thread_times(server, LOOP) - before
    first = 1000 * sum(got.first) / len(got.first)
    run = Run(work.tokens / got.seconds, times, client, got.events, got.num_bytes / 1024, first)
    return run, got.texts()


def measure(
    model: str, work: Work, threads: int, repeats: int, options: Sequence[str]
) -> tuple[list[Pair], list[float]]:
    """Alternating runs, without the first pair, which warms up, and the delays of first tokens."""
    port, pairs = free_port(), list[Pair]()
    os.environ["OMP_NUM_THREADS"] = str(threads)  # of the server; the engine gets the same
    command = [sys.executable, "-m", "minillm.lab.benchmarks.streams_engine", model]
    log = cache_folder() / "logs" / "streams.log"
    engine = EngineProcess(OWN, command, environment(OWN, threads), log)
    try:
        with server_process(serve_command(model, port, options), port) as server:
            for seed in range(repeats + 1):
                prompts = work.prompts(seed)
                offline, expected = offline_run(engine, work, prompts)
                served, texts = served_run(port, server.pid, work, prompts)
                equal = sum(a == b for a, b in zip(texts, expected, strict=True))
                pairs.append(Pair(offline, served, equal))
            delays = first_token_delays(port, work.prompts(repeats + 1)[:SINGLES])
    finally:
        engine.close()
    return pairs[1:], delays


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the runs."""
    names = sorted({name for run in runs for name in run.times.processors})
    rates = ("tokens_per_second", "client", "events", "kib", "first_token_ms")

    def times(of: Callable[[Run], Mapping[str, float]]) -> dict[str, float]:
        return {name: round(median(of(run).get(name, 0.0) for run in runs), 4) for name in names}

    return {name: round(median(map(attrgetter(name), runs)), 4) for name in rates} | {
        "rates": [round(run.tokens_per_second, 1) for run in runs],
        "processors": times(attrgetter("times.processors")),
        "waits": times(attrgetter("times.waits")),
    }


def process_seconds(figures: Mapping[str, Any]) -> float:
    """Processor seconds of all threads; those of the client are not in it."""
    return float(sum(figures["processors"].values()))


def rows(offline: Mapping[str, Any], served: Mapping[str, Any], tokens: int) -> list[list[str]]:
    """A row per figure, as the module describes them."""

    def shown(title: str, *values: float | None) -> list[str]:
        return [title, *("" if each is None else f"{each:,.1f}" for each in values)]

    made = [shown("tokens/s", offline["tokens_per_second"], served["tokens_per_second"])]
    for kind, title in (("processors", "us/token, {}"), ("waits", "waiting, {}")):
        for name in served[kind]:
            values = [each[kind].get(name) for each in (offline, served)]
            micro = [None if each is None else 1e6 * each / tokens for each in values]
            made.append(shown(title.format(name), *micro))
    totals = [1e6 * process_seconds(each) / tokens for each in (offline, served)]
    made.append(shown("us/token, process", *totals))
    blocked = [
        1e6 / each["tokens_per_second"]
        - 1e6 * (each["processors"].get(STEPS, 0) + each["waits"].get(STEPS, 0)) / tokens
        for each in (offline, served)
    ]
    made.append(shown("blocked, step thread", *blocked))
    made.append(shown("us/token, client", None, 1e6 * served["client"] / tokens))
    made.append(shown("tokens per event", None, tokens / max(served["events"], 1)))
    made.append(shown("bytes per token", None, 1024 * served["kib"] / tokens))
    made.append(shown("first token, ms", None, served["first_token_ms"]))
    return made


def folder_of(model: str) -> str:
    """What `LLM` loads: 135m is the shape of SmolLM2-135M with random weights."""
    return str(checkpoint_of("smollm2-135m")) if model == "135m" else model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table and JSON."""
    parser = benchmark_parser("serving_streams", __doc__, EXAMPLES)
    option = parser.add_argument
    option("--model", metavar="NAME", default="tiny", help="tiny, 135m, or a folder (tiny)")
    option("--streams", metavar="N", type=int, default=64, help="concurrent requests (64)")
    option("--prompt-tokens", metavar="N", type=int, default=64, help="tokens of a prompt (64)")
    option("--new-tokens", metavar="N", type=int, default=256, help="new tokens of a request (256)")
    option("--repeats", metavar="N", type=int, default=5, help="pairs of runs (5)")
    option("--threads", metavar="N", type=int, default=cpu_count(), help="threads (all cores)")
    option("--parse", action="store_true", help="the client parses each event")
    option("--event-rate", metavar="N", help="the server's --max-event-rate")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    work = Work(chosen.streams, chosen.prompt_tokens, chosen.new_tokens, chosen.parse)
    options = [
        "--disable-log-stats",
        "--enable-request-trace",
        "--max-num-seqs",
        str(max(chosen.streams, 256)),
    ]
    options += ["--max-event-rate", chosen.event_rate] if chosen.event_rate else []
    pairs, delays = measure(folder_of(chosen.model), work, chosen.threads, chosen.repeats, options)
    offline = summary([pair.offline for pair in pairs])
    served = summary([pair.served for pair in pairs])
    ratio = median(pair.ratio for pair in pairs)
    processors = process_seconds(offline) / (process_seconds(served) or math.nan)
    equal = min(pair.equal_texts for pair in pairs)
    terminal.heading(f"{chosen.model}: {ratio:.2f} of LLM.generate's tokens per second, "
                     f"{processors:.2f} of its tokens per processor second")  # fmt: skip
    terminal.table(["", "LLM.generate", "server"], rows(offline, served, work.tokens))
    terminal.paragraph(f"{equal} of {work.streams} texts are equal in every repeat.")
    terminal.paragraph(described(delays))
    result = {"benchmark": "serving_streams", "model": chosen.model, **asdict(work)}
    result |= {
        "ratio": ratio,
        "processor_ratio": round(processors, 4),
        "ratios": [round(pair.ratio, 4) for pair in pairs],
    }
    result |= {"first_token_delays_ms": [round(each, 3) for each in delays]}
    result |= {"equal_texts": equal, "offline": offline, "served": served}
    write_result(result, chosen.json, terminal)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server, too
    sys.exit(main())
