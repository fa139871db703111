"""What `minillm bench scale` shows: a table, and in sentences how well the law explains it."""

from collections.abc import Mapping
from typing import Any

from minillm.cli.terminal import Terminal, amount, seconds
from minillm.lab.benchmarks.others import disturbance

HEADER = ("", "step", "predicted", "ratio", "products", "pages", "overhead", "of bound", "host")


def show(found: Mapping[str, Any], terminal: Terminal) -> None:
    """A heading, the table, and what it says."""
    terminal.heading(
        f"scale: decode steps of {found['model']}, {found['dtype']}, {found['threads']} threads, "
        f"{found['machine']}"
    )
    if found["results"]:
        terminal.table(HEADER, table(found))
    for line in statement(found):
        terminal.paragraph(line)


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """A row per case."""
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
    """The rates, what they explain, the host's share, and what was left out."""
    lines = []
    if found["rates"] is not None:
        lines += [rates_line(found["rates"]), explained_line(found), host_line(found["host"])]
    return [*lines, *found["notes"], *disturbance(found["results"])]


def rates_line(rates: Mapping[str, float]) -> str:
    """The five rates."""
    return (
        f"Rates, measured apart: weights {amount(rates['stream'], 'B/s')} at one row, products "
        f"{amount(rates['matrix'], 'FLOP/s')} at the largest batch, pages "
        f"{amount(rates['pages'], 'B/s')}, overhead {seconds(rates['step_seconds'])} a step and "
        f"{seconds(rates['row_seconds'])} a sequence."
    )


def explained_line(found: Mapping[str, Any]) -> str:
    """How many cases are explained."""
    return (
        f"{found['explained']} of {len(found['results'])} steps are explained within "
        f"{found['tolerance']:.0%}; the worst prediction is {found['worst_ratio']:.2f} times what "
        "was measured."
    )


def host_line(host: Mapping[str, Any]) -> str:
    """The share of what is not the model."""
    aim = ""
    if host["aim"] is not None:
        aim = f" (aim: under {host['aim']:.0%}{', missed' * (host['share'] >= host['aim'])})"
    return (
        f"Of a step of B={host['batch']} ctx {host['context']}, {seconds(host['seconds'])} or "
        f"{host['share']:.1%}{aim} goes to scheduling, preparing inputs, books and outputs."
    )
