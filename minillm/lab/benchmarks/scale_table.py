"""The table that `minillm bench scale` prints, and the accuracy of its step-time model."""

from collections.abc import Mapping
from typing import Any

from minillm.cli.terminal import Terminal, amount, seconds
from minillm.lab.benchmarks.others import disturbance

HEADER = ("", "step", "predicted", "ratio", "products", "pages", "overhead", "of bound", "host")


def show(found: Mapping[str, Any], terminal: Terminal) -> None:
    """Print a heading, the table, and the conclusions."""
    terminal.heading(
        f"scale: decode steps of {found['model']}, {found['dtype']}, {found['threads']} threads, "
        f"{found['machine']}"
    )
    if found["results"]:
        terminal.table(HEADER, table(found))
    for line in statement(found):
        terminal.paragraph(line)


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """One row per case."""
    return [
        [
            f"B={one['batch']} ctx {one['context']}",
            seconds(one["step_seconds"]["median"]),
            seconds(one["predicted_seconds"]),
            f"{one['ratio']:.2f}",
            *(seconds(one["predicted"][part]) for part in ("products", "pages", "overhead")),
            f"{one['bound_seconds'] / one['step_seconds']['median']:.0%}",
            seconds(one["host_seconds"]),
        ]
        for one in found["results"]
    ]


def statement(found: Mapping[str, Any]) -> list[str]:
    """Lines about the rates, accuracy, host overhead, and cases that were left out."""
    lines = []
    if found["rates"] is not None:
        lines += [rates_line(found["rates"]), explained_line(found), host_line(found["host"])]
    return [*lines, *found["notes"], *disturbance(found["results"])]


def rates_line(rates: Mapping[str, float]) -> str:
    """The five measured rates."""
    return (
        f"Separately measured rates: weights {amount(rates['stream'], 'B/s')} at one row, products "
        f"{amount(rates['matrix'], 'FLOP/s')} at the largest batch, pages "
        f"{amount(rates['pages'], 'B/s')}, overhead {seconds(rates['step_seconds'])} per step and "
        f"{seconds(rates['row_seconds'])} per sequence."
    )


def explained_line(found: Mapping[str, Any]) -> str:
    """How many cases are predicted within the tolerance."""
    return (
        f"{found['explained']} of {len(found['results'])} steps are explained within "
        f"{found['tolerance']:.0%}; the worst prediction is {found['worst_ratio']:.2f} times the "
        "measured time."
    )


def host_line(host: Mapping[str, Any]) -> str:
    """The fraction of host overhead in a step."""
    aim = ""
    if host["aim"] is not None:
        aim = f" (target: under {host['aim']:.0%}{', missed' * (host['share'] >= host['aim'])})"
    return (
        f"Host overhead at B={host['batch']} ctx {host['context']}: {seconds(host['seconds'])} or "
        f"{host['share']:.1%} of a step{aim}, for scheduling, inputs, bookkeeping and outputs."
    )
