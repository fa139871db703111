"""The table that `minillm bench decode|prefill|offline` prints."""

from collections.abc import Mapping
from typing import Any

from minillm.cli.terminal import Terminal, amount, digits, seconds
from minillm.lab.benchmarks.others import DISTURBED, disturbance


def show(found: Mapping[str, Any], terminal: Terminal) -> None:
    """Print a heading, the table, and the conclusions."""
    terminal.heading(
        f"{found['benchmark']}: {found['model']}, {weights_line(found)}, "
        f"{found['threads']} threads, {found['machine']} ({class_of(found['processor'])})"
    )
    if found["results"]:
        header, rows = offline_table(found) if found["benchmark"] == "offline" else table(found)
        terminal.table(header, rows)
    if found.get("beside", {}).get("results"):
        terminal.line()
        terminal.table(*beside_table(found["beside"]))
    for line in [*found["statement"], *remarks(found)]:
        terminal.paragraph(line)


def weights_line(found: Mapping[str, Any]) -> str:
    """``bfloat16``, or ``weights in int4, bfloat16``."""
    name = (found.get("weights") or {}).get("name")
    return f"weights in {name}, " * (name is not None) + str(found["dtype"])


def class_of(processor: Mapping[str, Any]) -> str:
    """``avx512_bf16``, or ``avx512_bf16, all engines limited to avx2``."""
    forced = processor["forced_isa"]
    return processor["own_class"] + f", all engines limited to {forced}" * (forced is not None)


def beside_table(beside: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the speeds beside busy processes, and over the idle speeds."""
    rows, shown = [], ""
    for one in beside["results"]:
        name = f"B={one['batch']} ctx {one['context']}" if "batch" in one else "offline"
        rows.append(
            [
                name * (name != shown),
                one["engine"],
                digits(one["idle_tokens_per_second"]),
                in_brief(one["tokens_per_second"]),
                f"{one['over_idle']:.0%}",
                f"{beside['fair_share']:.0%}",
                f"{one['busy']:.0%}",
                f"{one['others']:.0%}",
            ]
        )
        shown = name
    count = beside["processes"]
    header = ["", "engine", "idle", f"tok/s beside {count}", "over idle", "fair", "busy", "others"]
    return header, rows


def table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per case and engine."""
    prefill, rows, shown = found["benchmark"] == "prefill", [], ""
    for one in found["results"]:
        name = f"B={one['batch']} ctx {one['context']}"
        unit = "FLOP/s" if one["bound"] == "compute" else "B/s"
        moved = one["flops_per_second" if one["bound"] == "compute" else "bytes_per_second"]
        rows.append(
            [
                name * (name != shown),
                one["engine"],
                seconds(one["step_seconds"]["median"]),
                in_brief(one["tokens_per_second"]),
                amount(moved, unit),
                f"{one['share_of_bound']:.0%}",
                f"{one['others']:.0%}",
            ]
        )
        shown = name
    step = "prompts" if prefill else "step"
    return ["", "engine", step, "tok/s (min median max)", "rate", "of bound", "others"], rows


def offline_table(found: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: one row per engine."""
    rows = [
        [
            one["engine"],
            seconds(one["seconds"]["median"]),
            in_brief(one["tokens_per_second"]),
            f"{one['others']:.0%}",
        ]
        for one in found["results"]
    ]
    return ["", "time", "new tok/s (min median max)", "others"], rows


def in_brief(values: Mapping[str, float]) -> str:
    """Minimum, median and maximum: ``98 101 104``."""
    return " ".join(digits(values[name]) for name in ("min", "median", "max"))


def remarks(found: Mapping[str, Any]) -> list[str]:
    """Lines about the ceilings, the engines, skipped engines, and disturbance."""
    lines = []
    for when, one in found["ceiling"].items():
        ways = ", ".join(f"{name} {amount(rate, 'B/s')}" for name, rate in one["ways"].items())
        disturbed = f" (other programs used {one['others']:.0%})" * (one["others"] > DISTURBED)
        rate = amount(one["flops"], "FLOP/s")
        lines.append(f"Ceilings {when}{disturbed}: {rate} in bf16; bandwidth: {ways}.")
    for name, facts in found["engines"].items():
        export = facts.get("export_seconds")
        lines.append(
            f"{name} {facts['version']}: weights {facts['weights']}, KV cache {facts['kv_cache']}, "
            f"ready after {seconds(facts['seconds'])}"
            + (f" and an export of {seconds(export)}" if export else "")
            + (f"; {facts['path']}." if "path" in facts else ".")
        )
    beside, measured = found.get("beside"), list(found["results"])
    if beside:
        lines.append(
            f"{beside['how']} A busy process is {beside['busy_process']}; the column busy is what "
            "they used of the processors."
        )
        measured += beside["results"]
    too_low = disturbance(measured, ", so these figures are too low")
    return [*lines, *found["left_out"].values(), *too_low]
