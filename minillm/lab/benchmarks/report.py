"""Options and JSON output shared by all benchmarks."""

import argparse
import json
from pathlib import Path
from typing import Any

from minillm.cli.terminal import Terminal


def benchmark_parser(name: str, description: str | None, examples: str) -> argparse.ArgumentParser:
    """The parser of ``python -m minillm.lab.benchmarks.NAME``, with --json."""
    parser = argparse.ArgumentParser(
        prog=f"python -m minillm.lab.benchmarks.{name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON to FILE")
    return parser


def write_result(result: dict[str, Any], file: Path | None, terminal: Terminal) -> None:
    """Write JSON to a file, or print it as the last line."""
    text = json.dumps(result)
    if file is None:
        terminal.line(text)
    else:
        file.write_text(text + "\n", "utf-8")
    terminal.flush()
