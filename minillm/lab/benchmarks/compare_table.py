"""The table that `minillm bench decode|prefill|offline` prints."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from minillm.cli.terminal import Terminal, amount, digits, seconds
from minillm.lab.benchmarks.others import DISTURBED, disturbance

Found = Mapping[str, Any]
Columns = dict[str, Callable[[Found], str]]
Table = tuple[list[str], list[list[str]]]


def show(result: Mapping[str, Any], terminal: Terminal) -> None:
    """Print a heading, the table, and the conclusions."""
    terminal.heading(
        f"{result['benchmark']}: {result['model']}, {weights_line(result)}, "
        f"{result['threads']} threads, {result['machine']} ({class_of(result['processor'])})"
    )
    if result["results"]:
        terminal.table(*table(result))
    if result.get("beside", {}).get("results"):
        terminal.line()
        terminal.table(*beside_table(result["beside"]))
    for line in [*result["statement"], *remarks(result)]:
        terminal.paragraph(line)


def weights_line(result: Mapping[str, Any]) -> str:
    """``bfloat16``, or ``weights in int4, bfloat16``."""
    name = (result.get("weights") or {}).get("name")
    return f"weights in {name}, " * (name is not None) + str(result["dtype"])


def class_of(processor: Mapping[str, Any]) -> str:
    """``avx512_bf16``, or ``avx512_bf16, all engines limited to avx2``."""
    forced = processor["forced_isa"]
    return processor["own_class"] + f", all engines limited to {forced}" * (forced is not None)


def beside_table(beside: Found) -> Table:
    """The speeds beside busy processes, and over the idle speeds."""
    columns: Columns = {
        "idle": lambda one: digits(one["idle_tokens_per_second"]),
        f"tok/s beside {beside['processes']}": lambda one: in_brief(one["tokens_per_second"]),
        "over idle": lambda one: f"{one['over_idle']:.0%}",
        "fair": lambda one: f"{beside['fair_share']:.0%}",
        "busy": lambda one: f"{one['busy']:.0%}",
        "others": lambda one: f"{one['others']:.0%}",
    }
    return table_of(columns, beside["results"])


def table(result: Found) -> Table:
    """The speeds, and what they are of the bound."""
    columns: Columns = {
        "prompts" if result["benchmark"] == "prefill" else "step": lambda one: seconds(
            one["step_seconds"]["median"]
        ),
        "tok/s (min median max)": lambda one: in_brief(one["tokens_per_second"]),
        "rate": lambda one: (
            amount(one["flops_per_second"], "FLOP/s")
            if one["bound"] == "compute"
            else amount(one["bytes_per_second"], "B/s")
        ),
        "of bound": lambda one: f"{one['share_of_bound']:.0%}",
        "others": lambda one: f"{one['others']:.0%}",
    }
    if result["benchmark"] == "offline":
        columns = {
            "time": lambda one: seconds(one["seconds"]["median"]),
            "new tok/s (min median max)": lambda one: in_brief(one["tokens_per_second"]),
            "others": columns["others"],
        }
    return table_of(columns, result["results"])


def table_of(columns: Columns, results: Sequence[Found]) -> Table:
    """Header and rows: one row per case and engine."""
    rows, shown = [], ""
    for one in results:
        name = f"B={one['batch']} ctx {one['context']}" if "batch" in one else "offline"
        rows.append([name * (name != shown), one["engine"], *(of(one) for of in columns.values())])
        shown = name
    return ["", "engine", *columns], rows


def in_brief(values: Mapping[str, float]) -> str:
    """Minimum, median and maximum: ``98 101 104``."""
    return " ".join(digits(values[name]) for name in ("min", "median", "max"))


def remarks(result: Mapping[str, Any]) -> list[str]:
    """Lines about the ceilings, the engines, skipped engines, and disturbance."""
    lines = []
    for when, one in result["ceiling"].items():
        ways = ", ".join(f"{name} {amount(rate, 'B/s')}" for name, rate in one["ways"].items())
        disturbed = f" (other programs used {one['others']:.0%})" * (one["others"] > DISTURBED)
        rate = amount(one["flops"], "FLOP/s")
        lines.append(f"Ceilings {when}{disturbed}: {rate} in bf16; bandwidth: {ways}.")
    for name, facts in result["engines"].items():
        export = facts.get("export_seconds")
        lines.append(
            f"{name} {facts['version']}: weights {facts['weights']}, KV cache {facts['kv_cache']}, "
            f"ready after {seconds(facts['seconds'])}"
            + (f" and an export of {seconds(export)}" if export else "")
            + (f"; {facts['path']}." if "path" in facts else ".")
        )
    beside, measured = result.get("beside"), list(result["results"])
    if beside:
        lines.append(
            f"{beside['how']} A busy process is {beside['busy_process']}; the column busy is what "
            "they used of the processors."
        )
        measured += beside["results"]
    too_low = disturbance(measured, ", so these figures are too low")
    return [*lines, *result["left_out"].values(), *too_low]
