"""Compares all methods on the embedded model, and writes notebooks/results/quantisation/tiny.json.

    python -m minillm.lab.comparison.study --json FILE

About 27 minutes of processor time. Parts: methods without calibration (plain), calibrated methods
with three calibration samples (seeded) and with one (calibrated), and the model with planted
outlier channels (planted).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from minillm.cli.terminal import Terminal
from minillm.lab.comparison.candidates import parse
from minillm.lab.comparison.outliers import plant_outliers
from minillm.lab.comparison.plot import draw
from minillm.lab.comparison.run import Work, compare
from minillm.lab.comparison.table import MAIN_PARTS

MODEL, GROUPS, SEEDS = "tiny", (128, 64, 32), (0, 1, 2)
PLAIN = (
    "int8", "int8:head16", "int8:head16:a8", "fp8", "fp8:row", "nf4", "nf4:no-double", "int4",
    *(f"rtn:{bits}:{group}" for bits in range(8, 1, -1) for group in GROUPS),
    "rtn:4:128:sym", "rtn:4:32:a8",
)  # fmt: skip
SEEDED = (
    *(f"gptq:4:{group}" for group in GROUPS), *(f"awq:4:{group}" for group in GROUPS),
    *(f"gptq:{bits}:{group}" for bits in (3, 2) for group in GROUPS),
)  # fmt: skip
CALIBRATED = (
    "smoothquant", "gptq:4:128:act-order", "awq:4:128:no-clip",
    *(f"gptq:{bits}:128" for bits in (8, 7, 6, 5)), "awq:3:128", "awq:2:128",
)  # fmt: skip
NAMES = ("plain", "planted", "seeded", "calibrated")
PLANTED = ("rtn:4:128", "awq:4:128:no-clip", "awq:4:128", "gptq:4:128")


def parts(threads: int) -> Iterator[tuple[str, Work]]:
    """The comparisons, by name."""

    def work(names: Sequence[str], **more: Any) -> Work:
        found = tuple(parse(name) for name in names)
        return Work(MODEL, found, speed=False, threads=threads, **more)

    yield "plain", work(PLAIN)
    yield "planted", work(PLANTED, prepare=plant_outliers)
    yield "seeded", work(SEEDED, seeds=SEEDS)
    yield "calibrated", work(CALIBRATED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; each is added to the file when it is done."""
    parser = argparse.ArgumentParser(
        prog="python -m minillm.lab.comparison.study", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="output file")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads (1)")
    parser.add_argument("--part", metavar="NAME", choices=NAMES, help="run one part only")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw all parts")
    args = parser.parse_args(arguments)
    for name, work in parts(args.threads):
        if args.part in (None, name):
            started = time.process_time()
            found = compare(work, teller(Terminal()))
            add_part(args.json, name, found | {"cpu_seconds": time.process_time() - started})
    if args.plot is not None:
        draw_study(json.loads(args.json.read_text("utf-8")), args.plot)
    return 0


def draw_study(study: dict[str, Any], name: Path) -> None:
    """Draw the parts with the same model in one figure."""
    base = study["plain"]["results"][0]
    rows = [row for part in MAIN_PARTS for row in study[part]["results"][1:]]
    draw({"model": MODEL, "results": [base, *rows]}, name)


def add_part(file: Path, name: str, found: dict[str, Any]) -> None:
    """Add a part to the file, or replace it."""
    known = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    known[name] = found
    ordered = {name: known[name] for name in NAMES if name in known}
    file.write_text(json.dumps(ordered, indent=1) + "\n", "utf-8")


def teller(terminal: Terminal) -> Callable[[str], None]:
    """A line of progress for every message."""
    return terminal.remark


if __name__ == "__main__":
    sys.exit(main())
