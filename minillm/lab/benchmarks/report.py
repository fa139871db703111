"""Options and JSON output shared by all benchmarks."""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.plan.machine import cpu_name


def benchmark_parser(name: str, description: str | None, examples: str) -> argparse.ArgumentParser:
    """The parser of ``python -m minillm.lab.benchmarks.NAME``, with --json and --quick."""
    parser = argparse.ArgumentParser(
        prog=f"python -m minillm.lab.benchmarks.{name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON to FILE")
    parser.add_argument("--quick", action="store_true", help="small sizes, to check that it runs")
    return parser


def about_machine(benchmark: str) -> dict[str, Any]:
    """The first fields of every result."""
    return {"benchmark": benchmark, "machine": cpu_name(), "python": platform.python_version()}


def write_result(result: dict[str, Any], file: Path | None, terminal: Terminal) -> None:
    """Write JSON to a file, or print it as the last line."""
    text = json.dumps(result)
    if file is None:
        terminal.line(text)
    else:
        file.write_text(text + "\n", "utf-8")
    terminal.flush()
