"""Cost of tracing: microseconds and bytes per step, and time and size of trace files and pages.

The recording calls (log entries, clock reads, appending to a full trace) are timed inside real
decode steps of a model, because their cost is smaller than the noise between two whole runs. A
second part saves, loads and renders a long trace without a model.
"""

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minillm.api.engine_args import EngineArgs
from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.cli.terminal import Terminal, size
from minillm.engine.loop import Engine
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.plan.machine import cpu_name
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.data_parallel import schedulers_of
from minillm.scheduling.record import Logbook
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace, TraceSettings

EXAMPLES = """examples:
  python -m minillm.lab.benchmarks.trace                    with the embedded model
  python -m minillm.lab.benchmarks.trace --model preset:smollm2-135m
  python -m minillm.lab.benchmarks.trace --quick            small sizes, to check that it runs
"""
AIM = 0.01  # target: fraction of the step time
CLOCKS = 4  # clock reads per step


@dataclass(frozen=True)
class Recording:
    """Medians over the steps of one run, in seconds."""

    running: int
    step: float
    recording: float

    @property
    def share(self) -> float:
        """Recording time as a fraction of the step time."""
        return self.recording / self.step


class Stopwatch:
    """Accumulates the time inside some methods, minus the stopwatch's own overhead."""

    def __init__(self) -> None:
        self.seconds = 0.0
        empty = self.watched(lambda: None)
        times = []
        for _ in range(200):
            self.seconds = 0.0
            empty()
            times.append(self.seconds)
        self.own, self.seconds = median(times), 0.0

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function with timing."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


@contextmanager
def watching(engine: Engine, watch: Stopwatch) -> Iterator[None]:
    """For the block, time everything that the engine does only for its trace."""
    log, trace = schedulers_of(engine.scheduler)[0].log, engine.trace
    names = [name for name in vars(Logbook) if not name.startswith("_")]
    for name in names:
        setattr(log, name, watch.watched(getattr(log, name)))
    trace.append = watch.watched(trace.append)  # type: ignore[method-assign]
    yield
    for name in names:
        delattr(log, name)
    del trace.append


def measure(model: str, running: int, steps: int) -> Recording:
    """Decode with `running` sequences and a full trace."""
    load = "dummy" if model.startswith("preset:") else "auto"
    engine = Engine(EngineArgs(model, load_format=load, max_num_seqs=running, max_model_len=512))
    clock = timed_clock()
    # A trace that is full after a few steps, so that each further step drops an old one.
    engine.trace = Trace(engine.trace.settings, capacity=4 * (running + 8))
    params = SamplingParams(max_tokens=steps + 16, ignore_eos=True, temperature=0.0)
    for number in range(running):
        engine.add(engine.make_request(str(number), None, [1 + number % 50, 2, 3], params))
    for _ in range(8):
        engine.step()
    watch = Stopwatch()
    times, costs = [], []
    with watching(engine, watch):
        for _ in range(steps):
            watch.seconds, start = 0.0, time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
            costs.append(max(watch.seconds - 2 * watch.own, 0.0) + CLOCKS * clock)
    engine.close()
    return Recording(running, median(times), median(costs))


def timed_clock() -> float:
    """Seconds of one clock read."""
    start = time.perf_counter()
    for _ in range(10_000):
        time.perf_counter()
    return (time.perf_counter() - start) / 10_000


# ---- a long trace ------------------------------------------------------------------------------


def long_trace(num_requests: int, num_steps: int, seed: int = 0) -> Trace:
    """A trace of the scheduler alone, with a simulated clock (20 ms per step) and made-up tokens.
    Requests arrive throughout, and the pool has too few blocks."""
    rng = random.Random(seed)
    per_request = num_steps * 24 / num_requests  # so that about 24 run at a time
    # An average sequence has 240 prompt tokens and half of its output: too few blocks for 24.
    blocks = BlockManager(int(24 * (240 + per_request / 2) / 16 * 0.8), 16, "hash")
    config = SchedulerConfig(max_num_seqs=48, max_num_batched_tokens=512)
    settings = TraceSettings(
        block_size=16, num_blocks=blocks.pool.num_blocks, max_num_seqs=48, clock=None, wall=None,
        max_num_batched_tokens=512, policy="fcfs", preemption="recompute", prefix_cache="hash",
    )  # fmt: skip
    scheduler, trace = Scheduler(config, blocks), Trace(settings, capacity=2**40)
    arrivals = sorted(rng.randrange(int(num_steps * 0.9)) for _ in range(num_requests))
    shared, now, added = [rng.randrange(999) for _ in range(64)], 0.0, 0
    for step in range(num_steps):
        while added < num_requests and arrivals[added] <= step:
            prompt = shared * (added % 3 == 0) + rng.choices(range(999), k=rng.randrange(20, 400))
            length = 1 + int(rng.expovariate(1 / per_request))
            params = SamplingParams(n=1 + (added % 10 == 0))
            scheduler.add(Request(f"request-{added}", tuple(prompt), params, length, arrival=now))
            added += 1
        if scheduler.has_work:
            plan = scheduler.schedule()
            trace.append(scheduler.record)
            sampled: dict[int, list[int | None]] = {
                row.seq_id: [rng.randrange(999)] * row.num_samples for row in plan.rows
            }
            scheduler.commit(plan, sampled)
            record = scheduler.record
            record.started, record.planned = now, now + 0.0005
            record.computed, record.delivered = now + 0.0195, now + 0.02
        now += 0.02
    return trace


def forms(trace: Trace) -> list[tuple[str, float, int]]:
    """For each file format of a trace: name, seconds to create it, and bytes."""
    results = []
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        for name, make in {
            "JSON lines, saved": lambda: trace.save(path),
            "JSON lines, loaded": lambda: Trace.load(path),
            "page (minillm trace view)": lambda: trace.save_html(path),
            "Chrome events": lambda: trace.save_chrome(path),
        }.items():
            start = time.perf_counter()
            make()
            results.append((name, time.perf_counter() - start, path.stat().st_size))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables, the conclusions and JSON."""
    parser = benchmark_parser("trace", __doc__, EXAMPLES)
    parser.add_argument("--model", default="tiny", help="the model (tiny)")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    batches, steps = ((1, 4), 6) if chosen.quick else ((1, 16, 64), 100)
    torch.set_num_threads(1)  # a second thread only adds waiting for so small a model
    recordings = []
    for running in batches:
        with terminal.progress(f"{chosen.model}, {running} sequences"):
            recordings.append(measure(chosen.model, running, steps))
    num_requests, num_steps = (20, 60) if chosen.quick else (1_000, 5_000)
    with terminal.progress(f"a trace of {num_requests:,} requests and {num_steps:,} steps"):
        trace = long_trace(num_requests, num_steps)
        written = forms(trace)
    terminal.heading(f"Cost of recording in a decode step of {chosen.model}")
    rows = [
        [f"{one.running}", f"{one.step * 1e3:.2f}", f"{one.recording * 1e6:.0f}",
         f"{one.share:.2%}"] for one in recordings
    ]  # fmt: skip
    terminal.table(["running", "step, ms", "recording, us", "share"], rows)
    worst = max(one.share for one in recordings)
    verdict = "reached" if worst < AIM else "missed"
    terminal.paragraph(f"At most {worst:.2%} of a step; the target of {AIM:.0%} is {verdict}.")
    num_rows = sum(len(record.rows) for record in trace)
    terminal.heading(f"{num_requests:,} requests, {len(trace):,} steps, {num_rows:,} rows")
    form_rows = [[name, f"{seconds:.2f}", size(count)] for name, seconds, count in written]
    terminal.table(["form", "seconds", "size"], form_rows)
    result = {
        "benchmark": "trace",
        "machine": cpu_name(),
        "model": chosen.model,
        "recording": [asdict(one) | {"share": one.share} for one in recordings],
        "forms": [{"name": n, "seconds": s, "bytes": b} for n, s, b in written],
    }
    write_result(result, chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
