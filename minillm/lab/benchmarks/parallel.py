"""``minillm bench parallel``: cost of parallelism on this machine.

Two tables: all-reduce and all-gather of two ranks with a fitted "latency + bytes / bandwidth"
model; step times of one rank and of several.
``minillm plan MODEL -tp N`` predicts several GPUs.
"""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks import collectives
from minillm.lab.benchmarks.report import about_machine
from minillm.lab.benchmarks.step_times import Sizes, Times, measure, opened
from minillm.lab.commands.bench import finish
from minillm.lab.commands.plan import find_config
from minillm.parallel import groups
from minillm.parallel.shared_memory import why_not
from minillm.plan.machine import cpu_count

CALLS, QUICK_CALLS = 300, 3
MODEL, SIZES = "preset:qwen3-0.6b", Sizes((1, 8))
QUICK_MODEL, QUICK = "tiny", Sizes((1,), context=16, steps=4, turns=3, prefill=32)
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
    found = []
    for kind, dtype in dict.fromkeys((row["kind"], row["dtype"]) for row in rows):
        mine = [row for row in rows if (row["kind"], row["dtype"]) == (kind, dtype)]
        points = [(row["bytes"], row["sum"] * 1e-6) for row in mine]
        latency, per_byte = fitted(points)
        ratios = [seconds / (latency + per_byte * size) for size, seconds in points]
        found.append({
            "kind": kind, "dtype": dtype, "latency": latency, "bandwidth": 1 / per_byte,
            "ratios": ratios,
        })  # fmt: skip
    return found


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
        table.append([" ".join(which), *(f"{each:,.1f}" for each in mine), spread])
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
    found = {"tp": split, "pp": {"pipeline_parallel_size": RANKS}, "dp": copies}
    return found | ({"ep": split | whole, "dp, ep": copies | whole} if has_experts else {})


def steps_of(model: str, sizes: Sizes, terminal: Terminal) -> list[Times]:
    """Step times of one rank with all processors, and of several that share the processors."""
    has_experts = find_config(model).moe is not None
    kinds = kinds_of_ranks(has_experts)
    sockets = {"tp, sockets": kinds["tp"]}
    with ExitStack() as stack:
        stack.enter_context(terminal.progress(f"{model}: steps"))
        engines = stack.enter_context(opened(model, "auto", sizes, {"1 rank": {}, **kinds}))
        with patch.object(groups, "shared_memory_works", lambda: False):
            engines |= stack.enter_context(opened(model, "auto", sizes, sockets))
        found = list(measure(engines, sizes))
    terminal.heading(f"{model}: milliseconds per step, one rank and {RANKS} ranks")
    columns = ["step", "parallelism", "1 rank", f"{RANKS} ranks", "speed-up", "quartiles"]
    terminal.table(columns, [one.row(inverse=True) for one in found])
    return found


def run(args: Namespace, terminal: Terminal) -> int:
    """Measure, print the tables, and write JSON."""
    calls = QUICK_CALLS if args.quick else CALLS
    with terminal.progress("Measuring all-reduce and all-gather"):
        kinds = ["gloo", "sockets", *([] if why_not() else ["shared"])]
        rows = [row for kind in kinds for row in collectives.measure(kind, calls)]
    fits = fit_sums(rows)
    show_collectives(rows, fits, terminal)
    model, sizes = (QUICK_MODEL, QUICK) if args.quick else (MODEL, SIZES)
    steps = steps_of(model, sizes, terminal)
    found = about_machine("parallel") | {
        "model": model, "processors": cpu_count(), "threads": torch.get_num_threads(),
        "collectives": rows, "fits": fits, "sizes": asdict(sizes),
        "steps": [one.as_json() for one in steps],
    }  # fmt: skip
    return finish(found, args, terminal, lambda *shown: None)


if __name__ == "__main__":
    raise SystemExit("This is no program; run 'minillm bench parallel'.")
