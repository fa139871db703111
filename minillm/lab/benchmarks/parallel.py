"""``minillm bench parallel``: cost of parallelism on this machine.

Two tables: all-reduce and all-gather of two ranks with a fitted "latency + bytes / bandwidth"
model; times of one rank and of several. ``minillm plan MODEL -tp N`` predicts several GPUs.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from statistics import median, quantiles
from time import perf_counter
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from minillm.api.sampling_params import SamplingParams
from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks import collectives
from minillm.lab.benchmarks.report import about_machine
from minillm.lab.commands.bench import finish
from minillm.lab.commands.plan import find_config
from minillm.llm import LLM
from minillm.parallel import groups
from minillm.parallel.shared_memory import why_not
from minillm.plan.machine import cpu_count


@dataclass(frozen=True)
class Case:
    """Greedy requests: how many, tokens of a prompt, and tokens that are generated."""

    batch: int
    prompt: int
    new: int

    def __str__(self) -> str:
        kind = "decode" if self.new > 1 else f"prefill {self.prompt}"
        return f"{kind}, batch {self.batch}"


CALLS, QUICK_CALLS = 300, 3
TURNS, QUICK_TURNS = 7, 3
MODEL, CASES = "preset:qwen3-0.6b", (Case(1, 16, 24), Case(8, 16, 24), Case(1, 256, 1))
QUICK_MODEL, QUICK = "tiny", (Case(1, 16, 4), Case(1, 32, 1))
RANKS = 2
Rows = list[dict[str, Any]]


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit latency and seconds per byte to (bytes, seconds), by least squares of relative errors, so
    that small messages count as much as large ones."""
    sizes, seconds = np.array(points).T
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / seconds[:, None]
    (latency, per_byte), *_ = np.linalg.lstsq(rows, np.ones_like(sizes), rcond=None)
    return float(latency), float(per_byte)


def fit_sums(rows: Rows) -> list[dict[str, Any]]:
    """For each communicator and dtype: latency, bandwidth, and ratios of measurement to model."""
    fits = []
    for kind, dtype in dict.fromkeys((row["kind"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
        points = [(row["bytes"], row["sum"] * 1e-6) for row in mine]
        latency, per_byte = fitted(points)
        ratios = [seconds / (latency + per_byte * size) for size, seconds in points]
        fits.append({
            "kind": kind, "dtype": dtype, "latency": latency, "bandwidth": 1 / per_byte,
            "ratios": ratios,
        })  # fmt: skip
    return fits


def show_collectives(rows: Rows, fits: list[dict[str, Any]], terminal: Terminal) -> None:
    """Print the measured times and the fitted models."""
    terminal.heading("All-reduce of two ranks: measured, and fitted latency + bytes / bandwidth")
    sizes = list(dict.fromkeys(int(row["bytes"]) for row in rows))
    columns = ["microseconds", *(f"{size // 1024:,} KB" for size in sizes), "ratio to model"]
    table = []
    for fit in fits:
        which = fit["kind"], fit["dtype"]
        mine = [row["sum"] for row in rows if (row["kind"], row["dtype"]) == which]
        spread = f"{min(fit['ratios']):.2f} to {max(fit['ratios']):.2f}"
        table.append([" ".join(which), *(f"{time:,.1f}" for time in mine), spread])
    terminal.table(columns, table)
    for fit in fits:
        terminal.line(
            f"  {fit['kind']}, {fit['dtype']}: {fit['latency'] * 1e6:,.1f} us + bytes / "
            f"{fit['bandwidth'] / 1e9:.2f} GB/s"
        )


def kinds_of_ranks(has_experts: bool) -> dict[str, dict[str, Any]]:
    """Kinds of parallelism by name, with the engine's arguments: "tp" splits each layer,
    with all-reduce over shared memory or sockets; "pp" has pipeline stages; "dp" has copies of the
    model; "ep" distributes whole experts; "dp, ep" has copies that share the experts."""
    split, copies = {"tensor_parallel_size": RANKS}, {"data_parallel_size": RANKS}
    whole = {"enable_expert_parallel": True}
    ways = {"tp": split, "pp": {"pipeline_parallel_size": RANKS}, "dp": copies}
    return ways | ({"ep": split | whole, "dp, ep": copies | whole} if has_experts else {})


def opened(model: str, **kind: Any) -> LLM:
    """An engine without a prefix cache, so that every prompt is computed; with random weights,
    except for `tiny`."""
    load_format = "auto" if model == QUICK_MODEL else "dummy"
    return LLM(model, device="cpu", load_format=load_format, max_model_len=512,
               kv_cache_memory_bytes=2**29, enable_prefix_caching=False, **kind)  # fmt: skip


def timed(llm: LLM, case: Case) -> float:
    """Seconds of all requests of a case."""
    params = SamplingParams(temperature=0, max_tokens=case.new, ignore_eos=True)
    start = perf_counter()
    llm.generate([[*range(case.prompt)]] * case.batch, params, use_tqdm=False)
    return perf_counter() - start


def measure(model: str, quick: bool) -> list[dict[str, Any]]:
    """Times of one rank with all processors, and of several that share the processors. Engines run
    in turn; a speed-up compares neighbouring turns, because disturbances affect both."""
    kinds = kinds_of_ranks(find_config(model).moe is not None)
    cases = []
    with ExitStack() as stack:
        alone = stack.enter_context(opened(model))
        engines = {name: stack.enter_context(opened(model, **kind)) for name, kind in kinds.items()}
        with patch.object(groups, "shared_memory_works", lambda: False):
            engines["tp, sockets"] = stack.enter_context(opened(model, **kinds["tp"]))
        for case in QUICK if quick else CASES:
            turns = [
                [timed(llm, case) for llm in (alone, *engines.values())]
                for _ in range((QUICK_TURNS if quick else TURNS) + 1)  # the first warms up
            ]
            base, *others = zip(*turns[1:], strict=True)
            for name, own in zip(engines, others, strict=True):
                speed_ups = [one / other for one, other in zip(base, own, strict=True)]
                cases.append({"case": str(case), "ranks": name, "alone": base, "seconds": own,
                              "speed_up": quantiles(speed_ups)})  # fmt: skip
    return cases


def show_times(model: str, cases: list[dict[str, Any]], terminal: Terminal) -> None:
    """Print the medians and the quartiles of the speed-ups."""
    terminal.heading(f"{model}: milliseconds of one rank and of {RANKS} ranks")
    rows = []
    for one in cases:
        low, middle, high = one["speed_up"]
        times = (f"{median(one[name]) * 1e3:,.1f}" for name in ("alone", "seconds"))
        spread = f"{low:.2f} to {high:.2f}"
        rows.append([one["case"], one["ranks"], *times, f"{middle:.2f}", spread])
    columns = ["", "parallelism", "1 rank", f"{RANKS} ranks", "speed-up", "quartiles"]
    terminal.table(columns, rows)


def run(args: Namespace, terminal: Terminal) -> int:
    """Measure, print the tables, and write JSON."""
    calls = QUICK_CALLS if args.quick else CALLS
    with terminal.progress("Measuring all-reduce and all-gather"):
        kinds = ["gloo", "sockets", *([] if why_not() else ["shared"])]
        rows = [row for kind in kinds for row in collectives.measure(kind, calls)]
    fits = fit_sums(rows)
    show_collectives(rows, fits, terminal)
    model = QUICK_MODEL if args.quick else MODEL
    with terminal.progress(f"{model}: one rank and {RANKS} ranks"):
        times = measure(model, args.quick)
    show_times(model, times, terminal)
    cases = [asdict(case) for case in (QUICK if args.quick else CASES)]
    data = about_machine("parallel") | {
        "model": model, "processors": cpu_count(), "threads": torch.get_num_threads(),
        "collectives": rows, "fits": fits, "cases": cases, "times": times,
    }  # fmt: skip
    return finish(data, args, terminal, lambda *shown: None)


if __name__ == "__main__":
    raise SystemExit("This is no program; run 'minillm bench parallel'.")
