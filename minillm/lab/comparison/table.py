"""The results of a comparison as tables on a terminal.

A cell is a number of the JSON data, rounded. With several calibration samples, the value is the
mean over them, and their spread (smallest to largest) stands behind it.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from minillm.cli.terminal import Terminal, digits

Found = Mapping[str, Any]
QUALITY = ("method", "W A", "bits", "MB file", "MB memory", "bits/byte", "change", "KL", "top-1",
           "KL run")  # fmt: skip
SPEED = ("method", "tok/s, B=1", "x 16 bit", "of read", "tok/s, B=16", "x 16 bit", "of read")
SETTINGS = ("method", "group", "zero points", "scales", "in 16 bits", "calibration", "made in")


# ---- cells ------------------------------------------------------------------------------------


def quality_cells(row: Found) -> list[str]:
    """Precision, sizes and quality of a model."""
    cells = [row["name"], precision(row), f"{row['bits_per_weight']:.2f}"]
    cells += [megabytes(row["disk"]["total"]), megabytes(row["memory"]["total"])]
    if "quality" not in row:
        return [*cells, *[""] * 5]
    return [
        *cells,
        f"{average(row, 'bits_per_byte'):.4f}",
        with_error(row, "bits_per_byte_change", "+") if "kl" in row["quality"][0] else "",
        with_error(row, "kl"),
        f"{average(row, 'same_top1'):.1%}" if "same_top1" in row["quality"][0] else "",
        with_error(row, "kl_run"),
    ]


def precision(row: Found) -> str:
    """Such as W4A16: the bits of weights and of the inputs of products."""
    return f"W{'/'.join(map(str, row['weight_bits']))}A{row['input_bits']}"


def megabytes(num_bytes: int) -> str:
    """In 10^6 bytes."""
    return f"{num_bytes / 1e6:.2f}"


def average(row: Found, metric: str) -> float:
    """The mean over calibration samples."""
    return mean(sample[metric]["value"] for sample in row["quality"])


def with_error(row: Found, metric: str, sign: str = "") -> str:
    """A metric with its standard error, and with the spread over calibration samples."""
    if metric not in row["quality"][0]:
        return ""
    values = [sample[metric]["value"] for sample in row["quality"]]
    error = max(sample[metric]["error"] for sample in row["quality"])
    text = f"{significant(average(row, metric), 3, sign)} ±{significant(error, 2)}"
    spread = f" ({significant(min(values), 3)} to {significant(max(values), 3)})"
    return text + spread * (len(values) > 1)


def significant(value: float, count: int, sign: str = "") -> str:
    """A number with `count` significant digits and at most 5 decimals, without an exponent."""
    places = count - 1 - math.floor(math.log10(abs(value))) if value else 0
    return f"{value:{sign}.{min(max(places, 0), 5)}f}"


def speed_cells(row: Found) -> list[str]:
    """Tokens/s, the ratio to 16 bits, and the fraction of the read ceiling, by batch."""
    cells = [row["name"]]
    for case in row["speed"]["by_batch"]:
        cells.append(digits(case["tokens_per_second"]))
        cells += [f"{case['over_16_bit']:.2f}", f"{case['of_read_ceiling']:.0%}"]
    return cells


def settings_cells(row: Found) -> list[str]:
    """How the weights are stored, and how they were made."""
    tokens, spent = row["calibration_tokens"], row["quantise_cpu_seconds"]
    return [
        row["name"],
        ", ".join(map(str, row["group_sizes"])),
        row["zero_points"] if row["group_sizes"] else "",
        ", ".join(row["scale_dtype"]),
        ", ".join(row["sixteen_bit"]),
        f"{tokens:,} tokens" if tokens else "",
        "" if spent is None else f"{digits(spent)} s",
    ]


# ---- on a terminal ----------------------------------------------------------------------------


def show(result: Found, terminal: Terminal) -> None:
    """Print all tables."""
    rows = result["results"]
    terminal.heading(heading(result))
    terminal.table(QUALITY, [quality_cells(row) for row in rows])
    if "speed" in rows[0]:
        terminal.heading(f"\n{speed_heading(rows)}")
        terminal.table(SPEED, [speed_cells(row) for row in rows])
    terminal.heading("\nHow the weights are stored; made in seconds of processor time")
    terminal.table(SETTINGS, [settings_cells(row) for row in rows])
    for note in result["notes"]:
        terminal.remark(note)


def heading(found: Found) -> str:
    """The model and the text."""
    text = found["text"]
    if text is None:
        return f"{found['model']}, random weights (sizes and speed only)"
    return (
        f"{found['model']} on {text['name']}: {text['windows']} windows of {text['length']} tokens,"
        f" {text['scored_bytes']:,} bytes scored, {found['arithmetic']} arithmetic; ± standard "
        "error, of the change and the KL per window"
    )


def speed_heading(rows: Sequence[Found]) -> str:
    """The conditions of the measured speed."""
    speed, context = rows[0]["speed"], rows[0]["speed"]["by_batch"][0]["context"]
    disturbed = max(case["others"] for row in rows for case in row["speed"]["by_batch"])
    return (
        f"Decoding in one process, {speed['threads']} threads of {speed['machine']}, "
        f"{speed['dtype']}, context {context}; 'of read': bytes of weights per second / read "
        f"rate measured beside it; other programs used up to {disturbed:.0%} of the processors"
    )
