"""The results of a comparison as tables: on a terminal, and in Markdown.

A cell is a number of the JSON data, rounded. With several calibration samples, the value is the
mean over them, and their spread (smallest to largest) stands behind it.
"""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from minillm.cli.terminal import Terminal, digits
from minillm.errors import ConfigError
from minillm.lab.comparison.outliers import FACTOR, STEP

Found = Mapping[str, Any]
SECTION = "## Quantised weights"
MAIN_PARTS = ("plain", "seeded", "calibrated")  # the parts of a study with the same model
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
    return mean(each[metric]["value"] for each in row["quality"])


def with_error(row: Found, metric: str, sign: str = "") -> str:
    """A metric with its standard error, and with the spread over calibration samples."""
    if metric not in row["quality"][0]:
        return ""
    values = [each[metric]["value"] for each in row["quality"]]
    error = max(each[metric]["error"] for each in row["quality"])
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


def show(found: Found, terminal: Terminal) -> None:
    """Print all tables."""
    rows = found["results"]
    terminal.heading(heading(found))
    terminal.table(QUALITY, [quality_cells(row) for row in rows])
    if "speed" in rows[0]:
        terminal.heading(f"\n{speed_heading(rows)}")
        terminal.table(SPEED, [speed_cells(row) for row in rows])
    terminal.heading("\nHow the weights are stored; made in seconds of processor time")
    terminal.table(SETTINGS, [settings_cells(row) for row in rows])
    for note in found["notes"]:
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


# ---- in Markdown ------------------------------------------------------------------------------


def section(study: Found) -> str:
    """The section of a study, with its heading."""
    return "\n".join(lines_of(study))


def lines_of(study: Found) -> Iterator[str]:
    """The lines of the section."""
    plain, planted = study["plain"], study["planted"]
    text = plain["text"]
    base = plain["results"][0]
    seeds = len(study["seeded"]["seeds"])
    yield from (SECTION, "")
    yield wrapped(
        f"`{plain['model']}` on {text['windows']} windows of {text['length']} tokens of "
        f"{text['name']} text ({text['scored_bytes']:,} bytes), float32 arithmetic, linear layers "
        "quantised, embedding and tied output matrix in 16 bits unless a row says otherwise. "
        f"16 bit: {base['quality'][0]['bits_per_byte']['value']:.4f} ± "
        f"{base['quality'][0]['bits_per_byte']['error']:.4f} bits per byte. "
        "`±` is the standard error over windows; changes and KL are paired by window. "
        f"With {seeds} calibration samples of 32,768 tokens, a cell has their mean and (smallest "
        "to largest). MB: 10^6 bytes that a file needs, scales included. "
        "`python -m minillm.lab.comparison.study --json FILE` repeats the measurement."
    )
    yield from ("", "![Quality against size](quantisation/tiny.png)", "")
    rows = [row for name in MAIN_PARTS for row in study[name]["results"][1:]]
    yield from markdown([base, *sorted(rows, key=by_bits_and_divergence)])
    yield from ("", wrapped(findings({row["name"]: row for row in rows})))
    yield from ("", "### With planted outlier channels", "")
    outliers = {row["name"]: row for row in planted["results"]}
    kl = [average(outliers[name], "kl") for name in ("rtn:4:128", "awq:4:128:no-clip", "awq:4:128")]
    yield wrapped(
        f"The same function, with every {STEP}nd channel of the norms {FACTOR:.0f} times as large "
        "and the columns that read it divided by as much (`minillm/lab/comparison/outliers.py`). "
        f"AWQ's scales lower the KL of rounding from {kl[0]:.4f} to {kl[1]:.4f}, and with clipping "
        f"it is {kl[2]:.4f}."
    )
    yield ""
    yield from markdown(planted["results"])
    yield ""


def wrapped(text: str) -> str:
    """A paragraph of Markdown in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def by_bits_and_divergence(row: Found) -> tuple[int, float]:
    """The order of the rows: most bits first; of equal bits the most similar to 16 bits."""
    return -max(row["weight_bits"]), average(row, "kl")


def findings(rows: Mapping[str, Found]) -> str:
    """What the table shows, in numbers from it."""
    kl = {name: average(row, "kl") for name, row in rows.items()}
    change = average(rows["int8:head16"], "bits_per_byte_change")
    samples = [each["kl"]["value"] for each in rows["gptq:4:128"]["quality"]]
    return (
        f"8 bits per row change the bits per byte by {change:+.5f}. With 4 bits in groups of 128, "
        f"GPTQ has {kl['gptq:4:128'] / kl['rtn:4:128']:.2f} times the KL of rounding; its "
        f"calibration samples differ by {(max(samples) - min(samples)) / mean(samples):.1%}. "
        f"AWQ's scales alone (`no-clip`) have {kl['awq:4:128:no-clip'] / kl['rtn:4:128']:.2f} "
        f"times the KL of rounding, and with its search for smaller ranges "
        f"{kl['awq:4:128'] / kl['rtn:4:128']:.2f} times: this model has no outlier channels to "
        "protect, so the gain is that of clipping. Inputs rounded to 8 bits (`a8`) raise the KL "
        f"of 4-bit weights in groups of 32 from {kl['rtn:4:32']:.4f} to {kl['rtn:4:32:a8']:.4f}. "
        f"8-bit integers with a scale per row have {kl['int8:head16']:.5f}, and FP8 numbers "
        f"{kl['fp8:row']:.5f}."
    )


def markdown(rows: Sequence[Found]) -> Iterator[str]:
    """A table of quality."""
    yield f"| {' | '.join(name for name in QUALITY if name != 'MB memory')} | made in, CPU s |"
    yield "|---" * len(QUALITY) + "|"
    for row in rows:
        cells = quality_cells(row)
        del cells[QUALITY.index("MB memory")]
        spent = row["quantise_cpu_seconds"]
        yield f"| {' | '.join(cells)} | {'' if spent is None else f'{spent:.2g}'} |"


def replace_section(text: str, new: str) -> str:
    """A Markdown text with this section replaced."""
    before, found, rest = text.partition(f"{SECTION}\n")
    if not found:
        raise ConfigError(f"The file has no section {SECTION!r}; add this heading where it goes.")
    _, mark, after = rest.partition("\n## ")
    return before + new + mark + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the section of a study, or write it into a file."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm.lab.comparison.table", description=__doc__
    )
    parser.add_argument("study", type=Path, help="JSON of minillm.lab.comparison.study")
    parser.add_argument("--into", type=Path, metavar="FILE", help="replace the section of FILE")
    args = parser.parse_args(arguments)
    for path in (args.study, args.into):
        if path is not None and not path.is_file():
            parser.error(f"{path} does not exist.")
    new = section(json.loads(args.study.read_text("utf-8")))
    if args.into is None:
        Terminal().line(new)
    else:
        args.into.write_text(replace_section(args.into.read_text("utf-8"), new), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
