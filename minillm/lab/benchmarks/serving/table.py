"""The report of `minillm bench serve` on the terminal."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from minillm.cli.terminal import Terminal, digits, plural, seconds
from minillm.lab.benchmarks.serving.bench import name_of

LATENCIES: Mapping[str, str] = {  # heads of columns
    "ttft_p50": "TTFT p50", "ttft_p99": "p99", "tpot_p50": "TPOT p50", "tpot_p99": "p99",
    "itl_p99": "ITL p99", "itl_max": "max",
}  # fmt: skip
RATES: Mapping[str, str] = {
    "output_throughput": "tokens/s", "request_throughput": "requests/s", "rejected": "rejected",
    "failed": "failed", "attainment": "SLO met", "goodput": "goodput",
}  # fmt: skip
SHARES = ("rejected", "failed", "attainment")
LATE = 0.01  # seconds; a client that is later than this may distort the figures
LEAST_FRAMES = 0.5  # per output token; fewer frames distort TPOT and ITL
LATE_SHARE = 0.1  # of the median TTFT


def show(result: Mapping[str, Any], terminal: Terminal) -> None:
    """Print a heading, a row per load, and the conclusions."""
    target, plan = result["target"], result["plan"]
    terminal.heading(f"serve: {target['model']} at {target['url']}")
    terminal.paragraph(
        f"{plan['process']}; workload {plan['workload']}; seed {plan['seed']}, "
        f"{plural(plan['repeats'], 'repeat')}."
    )
    points = [
        (name_of(math.inf if one["load"] is None else one["load"], plan["closed"]), one)
        for one in result["points"]
    ]
    rows = [[load, *(shown(one[name]) for name in LATENCIES)] for load, one in points]
    terminal.table(("latency", *LATENCIES.values()), rows)
    terminal.line()
    rates = [name for name in RATES if result["slo"] or name not in ("attainment", "goodput")]
    rows = [[load, *(shown(one[name], name) for name in rates)] for load, one in points]
    terminal.table(("load", *(RATES[name] for name in rates)), rows)
    if len(result["runs"]) == 1:
        show_latencies(result["runs"][0]["summary"], terminal)
    for line in statement(result):
        terminal.paragraph(line)


def shown(value: Mapping[str, float] | None, name: str = "") -> str:
    """The median of a rate, a share or else a duration; a dash if it is not defined."""
    if value is None:
        return "-"
    middle = value["median"]
    return f"{middle:.0%}" if name in SHARES else digits(middle) if name else seconds(middle)


def show_latencies(summary: Mapping[str, Any], terminal: Terminal) -> None:
    """Print every latency of a single run."""
    quantiles = ("mean", "p50", "p90", "p99")
    rows = [
        [name, *(seconds(one[which]) for which in quantiles)]
        for name, one in summary["latencies"].items()
        if one is not None
    ]
    if rows:
        terminal.line()
        terminal.table(("measure, as in vLLM", *quantiles), rows)
        terminal.line()


def statement(result: Mapping[str, Any]) -> list[str]:
    """Lines about the SLO, the search, errors and the client."""
    lines = [*slo_lines(result), *search_lines(result)]
    if result["knee"] is not None:
        load = name_of(result["knee"]["load"], result["plan"]["closed"])
        lines.append(f"Knee: {load} ({result['knee']['why']}).")
    if len(result["runs"]) == 1:
        lines += run_lines(result["runs"][0]["summary"])
    lines += error_lines(result)
    return [*lines, *late_lines(result), *result["notes"]]


def slo_lines(result: Mapping[str, Any]) -> list[str]:
    """Attainment of each objective and goodput, of the last run of each load."""
    if not result["slo"]:
        return []
    wanted = ", ".join(f"{name} <= {seconds(most)}" for name, most in result["slo"].items())
    lines = [f"SLO: {wanted}; attainment counts all requests sent, failed ones as missed."]
    if len(result["runs"]) == 1:
        slo = result["runs"][0]["summary"]["slo"]
        each = ", ".join(f"{name} {share:.1%}" for name, share in slo["attainment_of"].items())
        lines.append(
            f"Attainment {slo['attainment']:.1%} ({each}); goodput {digits(slo['goodput'])} "
            "requests/s."
        )
    return lines


def search_lines(result: Mapping[str, Any]) -> list[str]:
    """The result of --search."""
    search = result["search"]
    if search is None:
        return []
    target = f"an attainment of {search['target']:.0%}"
    if search["keeps"] is None:
        return [
            f"No rate down to {search['misses']:g} requests/s keeps {target}; the SLO may be out "
            "of reach of this server."
        ]
    kept = f"{search['keeps']:.3g} requests/s keeps {target}"
    if search["misses"] is None:
        return [f"{kept}, and no rate that was tried misses it; send more requests per run."]
    return [
        f"Highest rate: {kept} (measured {search['keeps_attainment']:.1%}), "
        f"{search['misses']:.3g} requests/s does not ({search['misses_attainment']:.1%}); "
        f"tolerance {search['tolerance']:.0%}, {plural(search['probes'], 'rate')} tried."
    ]


def run_lines(summary: Mapping[str, Any]) -> list[str]:
    """Throughput, prefix cache and concurrency of one run."""
    lines = [
        f"{summary['ok']} of {plural(summary['sent'], 'request')} succeeded in "
        f"{seconds(summary['wall'])}: {digits(summary['request_throughput'])} requests/s, "
        f"{digits(summary['output_throughput'])} output tokens/s (peak of one second "
        f"{digits(summary['peak_output_throughput'])}), {digits(summary['input_throughput'])} "
        "input tokens/s."
    ]
    if summary["prompt_tokens"] and summary["cached_tokens"]:
        share = summary["cached_tokens"] / summary["prompt_tokens"]
        lines.append(f"{share:.0%} of the prompt tokens came from the prefix cache.")
    return [*lines, f"At most {plural(summary['peak_concurrency'], 'request')} at once."]


def error_lines(result: Mapping[str, Any]) -> list[str]:
    """How often each error occurred, over all runs."""
    total: Counter[str] = Counter()
    for run in result["runs"]:
        total.update(run["summary"]["errors"])
    return [f"{plural(count, 'request')} failed: {what}" for what, count in total.items()]


def late_lines(result: Mapping[str, Any]) -> list[str]:
    """A warning if the client itself was late, and tokens that were counted without usage."""
    late = max(((run["summary"]["lateness"] or {}).get("p99", 0.0) for run in result["runs"]),
               default=0.0)  # fmt: skip
    lines = [f"The client sent its requests at most {seconds(max(late, 0.0))} late (p99)."]
    first = [one["ttft_p50"]["median"] for one in result["points"] if one["ttft_p50"]]
    if not result["plan"]["limited"] and late > LATE and late > LATE_SHARE * min(first, default=0):
        lines[0] += (
            " This is part of the latencies; run the client on another machine, or lower the rate."
        )
    frames, tokens = (
        sum(run["summary"][name] for run in result["runs"]) for name in ("frames", "output_tokens")
    )
    if frames < LEAST_FRAMES * tokens:
        lines.append(
            f"The server sent {frames:,} frames for {tokens:,} tokens; TPOT and ITL are those of "
            "frames with several tokens, and a TTFT includes all tokens of its frame."
        )
    if any(run["summary"]["without_usage"] for run in result["runs"]):
        lines.append("The server reports no usage; frames with text are counted as tokens.")
    return lines
