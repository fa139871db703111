"""``minillm bench parallel``: cost of parallelism on this machine, and predictions for GPUs.

Four tables: all-reduce and all-gather of two ranks with a fitted "latency + bytes / bandwidth"
model; step times of one rank and of several; load balance of experts with a skewed router; and
predictions, labelled as such, for models that need several GPUs.
"""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks import collectives, expert_placement, parallel_steps
from minillm.lab.benchmarks.report import benchmark_parser, write_result
from minillm.lab.parallel_cost import Prediction, large_model_predictions
from minillm.lab.parallel_layout import Layout
from minillm.parallel.shared_memory import why_not

EXAMPLES = """examples:
  minillm bench parallel                       all four tables
  minillm bench parallel --quick               small sizes, to check that it runs
"""
CALLS, QUICK_CALLS = 300, 3
SHOWN = (4, 8)  # numbers of devices in the printed predictions; the JSON has all
Rows = list[dict[str, Any]]
Key = tuple[str, str, str, Layout]


def fitted(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit latency and seconds per byte to (bytes, seconds), by least squares of relative errors, so
    that small messages count as much as large ones."""
    # Weighted by 1 / seconds: minimise the sum of (a / t + b x / t - 1) squared.
    rows = [(1 / seconds, size / seconds) for size, seconds in points]
    aa = sum(one * one for one, _ in rows)
    ab = sum(one * other for one, other in rows)
    bb = sum(other * other for _, other in rows)
    a, b = sum(one for one, _ in rows), sum(other for _, other in rows)
    determinant = aa * bb - ab * ab
    return (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant


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


def predicted(found: Mapping[Key, Prediction]) -> Rows:
    """JSON data of every prediction that fits into the memory of its devices."""
    return [
        {
            "model": model, "hardware": hardware, "link": link, "devices": layout.tensor,
            "whole_experts": layout.expert_parallel, "own_attention": layout.own_attention,
            "cache_tokens": one.cache_tokens,
            "tokens_per_second": {
                batch: time.tokens_per_second
                for batch, time in one.decode.items()
                if one.holds(batch)
            },
            "communication": {batch: time.communication for batch, time in one.decode.items()},
            "prefill_seconds": one.prefill.seconds,
        }
        for (model, hardware, link, layout), one in found.items()
        if one.holds(1)
    ]  # fmt: skip


def show_predictions(rows: Rows, terminal: Terminal) -> None:
    """Print tokens per second at batch 1 and batch 64."""
    terminal.heading("Predictions, from datasheets and published latencies of links")
    table = [
        [
            row["model"].removeprefix("preset:"), row["hardware"], row["link"],
            f"{row['devices']}{' EP' * row['whole_experts']}{' DP' * row['own_attention']}",
            *(rate(row, batch) for batch in (1, 64)),
        ]
        for row in rows
        if row["devices"] in SHOWN
    ]  # fmt: skip
    terminal.table(["model", "GPU", "link", "GPUs", "batch 1", "batch 64"], table)
    terminal.paragraph(
        "Tokens per second, and in brackets the fraction of time spent on communication. EP: "
        "expert parallelism; DP: data-parallel attention. Nothing in this table was measured."
    )


def rate(row: dict[str, Any], batch: int) -> str:
    """Tokens per second and fraction of communication; a dash if the batch does not fit."""
    if batch not in row["tokens_per_second"]:
        return "-"
    return f"{row['tokens_per_second'][batch]:,.0f} ({row['communication'][batch]:.0%})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables and JSON."""
    parser = benchmark_parser("parallel", __doc__, EXAMPLES)
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    chosen, terminal = parser.parse_args(arguments), Terminal()
    calls = QUICK_CALLS if chosen.quick else CALLS
    with terminal.progress("Measuring all-reduce and all-gather"):
        rows = collectives.measure("gloo", calls) + collectives.measure("sockets", calls)
        rows += [] if why_not() else collectives.measure("shared", calls)
    fits = fit_sums(rows)
    show_collectives(rows, fits, terminal)
    model, sizes = parallel_steps.MODEL, parallel_steps.Sizes()
    if chosen.quick:
        model, sizes = parallel_steps.quick()
    steps = parallel_steps.measure(model, "auto", sizes, terminal)
    parallel_steps.show(model, sizes, steps, terminal)
    balances = expert_placement.measure(QUICK_CALLS if chosen.quick else expert_placement.STEPS)
    expert_placement.show(balances, terminal)
    predictions = predicted(large_model_predictions())
    show_predictions(predictions, terminal)
    result = parallel_steps.as_json(model, "auto", sizes, steps)
    result |= {"benchmark": "parallel", "collectives": rows, "fits": fits}
    result["balances"] = balances
    write_result(result | {"predictions": predictions}, chosen.json, terminal)
    return 0


if __name__ == "__main__":
    sys.exit(main())
