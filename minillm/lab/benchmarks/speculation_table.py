"""The table of `minillm bench speculation`."""

import re
from collections.abc import Mapping
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.lab.benchmarks.speculation import PLAIN, verification_cost


def show(result: Mapping[str, Any], terminal: Terminal) -> None:
    """Print a row for each variant and batch, and the cost of verification."""
    terminal.heading(f"speculation: {result['model']}, {result['dtype']}, {result['machine']}")
    rows = [
        [
            one["workload"],
            str(one["batch"]),
            one["variant"],
            f"{one['tokens_per_second']['median']:,.0f}",
            ratio(one),
            f"{one['tokens_per_step']:.2f}",
            drafted_per_accepted(one),
            # Without zeros at the end: a tree has many more drafts than its paths are long.
            re.sub("( 0.00)+$", "", " ".join(f"{rate:.2f}" for rate in one["acceptance"])) or "-",
            f"{one['others']:.0%}",
        ]
        for one in result["results"]
    ]
    terminal.table(
        ["workload", "batch", "variant", "tok/s", "over plain", "tokens per step",
         "drafted per accepted", "acceptance of draft 1, 2, ...", "others"],
        rows,
    )  # fmt: skip
    costs = [f"{n} positions {cost:.2f}x" for n, cost in verification_cost(result)]
    if costs:
        terminal.paragraph(f"Verification step over plain step, batch 1: {', '.join(costs)}.")
    for line in [*result["statement"], *result["left_out"].values()]:
        terminal.paragraph(line)


def drafted_per_accepted(one: Mapping[str, Any]) -> str:
    """Drafted tokens for each accepted one, "-" without any."""
    accepted = sum(one["acceptance"]) * one["num_drafts"]
    return f"{one['num_draft_tokens'] / accepted:.2f}" if accepted else "-"


def ratio(one: Mapping[str, Any]) -> str:
    """Median of the ratios to plain decoding, and its confidence interval."""
    if one["variant"] == PLAIN:
        return "1"
    low, high = one["ratio"]["interval"]
    return f"{one['ratio']['median']:.2f} ({low:.2f} to {high:.2f})"
