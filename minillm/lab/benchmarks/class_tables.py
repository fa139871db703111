"""The measured tables of `notebooks/results/README.md`, one per class of processor.

``python -m minillm.lab.benchmarks.class_tables`` reads the recorded comparisons (the files that
`minillm bench decode|prefill|offline --json FILE` wrote) and prints a table for each class of
processor, or replaces the section of a Markdown file by them.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minillm.cli.terminal import Terminal, digits
from minillm.errors import ConfigError
from minillm.lab.benchmarks.compare_table import weights_line
from minillm.lab.benchmarks.engine_process import OWN

SECTION = "## Speed by processor class"
NOTE = "Compare only within a table: memory bandwidth differed between the runs."
LABELS = MappingProxyType(  # column heads, in order
    {
        OWN: OWN,
        "openvino": "OpenVINO GenAI",
        "vllm": "vLLM-CPU",
        "llamacpp": "llama.cpp",
        "transformers": "transformers",
    }
)
CLASSES = ("amx", "avx512_bf16", "avx512", "avx2", "neon", "other")
BENCHMARKS = ("decode", "prefill", "offline")
Found = Mapping[str, Any]


def recorded(folder: Path) -> list[tuple[str, Found]]:
    """File names and contents of the comparisons in a folder that name their processor class."""
    files = [(file.name, json.loads(file.read_text("utf-8"))) for file in folder.glob("*.json")]
    known = [one for one in files if one[1]["benchmark"] in BENCHMARKS and "processor" in one[1]]
    return sorted(known, key=lambda one: (place_of(one[1]), one[0]))


def place_of(found: Found) -> tuple[int, bool]:
    """The place of a comparison's class among the tables; forced classes come after real ones."""
    kind = found["processor"]
    return CLASSES.index(kind["class"]), kind["forced_isa"] is not None


def section(folder: Path) -> str:
    """The section of all tables; without comparisons, a sentence."""
    groups: dict[str, list[tuple[str, Found]]] = {}
    for name, found in recorded(folder):
        groups.setdefault(heading(found), []).append((name, found))
    parts = ["\n".join(lines_of(title, group)) for title, group in groups.items()]
    note = NOTE if parts else "No comparison is recorded yet."
    return "\n\n".join([SECTION, note, *parts]) + "\n"


def heading(found: Found) -> str:
    """The class, the machine, and whether the class was forced."""
    kind = found["processor"]
    text = f"### {kind['class']}: {found['machine']}, {found['threads']} threads"
    return text + f", limited from {kind['own_class']}" * (kind["forced_isa"] is not None)


def lines_of(title: str, group: Sequence[tuple[str, Found]]) -> Iterator[str]:
    """The lines of one class: the table, and the files."""
    present = {one["engine"] for _, found in group for one in found["results"]}
    engines = [name for name in LABELS if name in present]
    yield from (title, "")
    yield f"| work | {' | '.join(map(LABELS.__getitem__, engines))} | ratio to the best peer |"
    yield "|---" * (len(engines) + 2) + "|"
    for _, found in group:
        yield from rows(found, None, engines)
        if beside := found.get("beside"):
            yield from rows(found, beside, engines)
    yield ""
    yield "Files: " + ", ".join(
        f"[{name.removesuffix('.json')}](bench/{name})" for name, _ in group
    )


def rows(found: Found, beside: Found | None, engines: Sequence[str]) -> Iterator[str]:
    """A row for each case, idle or beside busy processes: speeds, and minillm's ratio to the best
    peer."""
    cases: dict[str, dict[str, Found]] = {}
    for one in (beside or found)["results"]:
        cases.setdefault(work_of(found, one), {})[one["engine"]] = one
    for work, by_engine in cases.items():
        cells = [cell(by_engine[name]) if name in by_engine else "" for name in engines]
        speeds = {name: one["tokens_per_second"]["median"] for name, one in by_engine.items()}
        peers = [speed for name, speed in speeds.items() if name != OWN]
        ratio = f"{speeds[OWN] / max(peers):.2f}" if peers and OWN in speeds else ""
        if beside:
            work += beside_text(beside)
        yield f"| {work} | {' | '.join(cells)} | {ratio} |"


def beside_text(beside: Found) -> str:
    """The number of busy processes, and the fair share of the processor."""
    count = beside["processes"]
    noun = "process" if count == 1 else "processes"
    return f", {count} busy {noun} beside it (fair share: {beside['fair_share']:.0%} of idle speed)"


def work_of(found: Found, one: Found) -> str:
    """The model, the dtype and the case of a result."""
    name, weights = found["model"].removeprefix("preset:"), weights_line(found)
    start = f"{name}, {weights}, {found['benchmark']}"
    if "batch" not in one:
        return f"{start}, {one['requests']} requests"
    if found["benchmark"] == "prefill":
        return f"{start}, {one['batch']} x {one['context']:,}"
    return f"{start}, batch {one['batch']}, context {one['context']:,}"


def cell(one: Found) -> str:
    """A speed in tokens per second, and beside busy processes its fraction of the idle speed."""
    speed = digits(one["tokens_per_second"]["median"])
    return f"{speed} ({one['over_idle']:.0%})" if "over_idle" in one else speed


def replace_section(text: str, new: str) -> str:
    """A Markdown text with this section replaced."""
    before, found, rest = text.partition(f"{SECTION}\n")
    if not found:
        raise ConfigError(f"The file has no section {SECTION!r}; add this heading where it goes.")
    _, mark, after = rest.partition("\n## ")
    return before + new + mark + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write them into a file."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm.lab.benchmarks.class_tables", description=__doc__
    )
    parser.add_argument("folder", type=Path, help="folder of recorded comparisons (JSON)")
    parser.add_argument("--into", type=Path, metavar="FILE", help="replace the section of FILE")
    args = parser.parse_args(arguments)
    if not args.folder.is_dir():  # else the tables of FILE would be replaced by nothing
        parser.error(f"{args.folder} is not a folder; name the one with the JSON files.")
    if args.into is not None and not args.into.is_file():
        parser.error(f"--into is {args.into}, which does not exist; name a Markdown file.")
    new = section(args.folder)
    if args.into is None:
        Terminal().line(new)
    else:
        args.into.write_text(replace_section(args.into.read_text("utf-8"), new), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
