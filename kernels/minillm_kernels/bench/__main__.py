"""``python -m minillm_kernels.bench``: how close the kernels come to this GPU's limits."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from minillm_kernels import families
from minillm_kernels.bench import report
from minillm_kernels.bench.gpu import NoGpuError, require_gpu
from minillm_kernels.bench.supervisor import Process, Supervisor, Worker
from minillm_kernels.bench.worker import Job

SECONDS = 400.0  # a run of eight minutes with everything around the measurements
QUICK_SECONDS = 100.0
RESULTS = Path(__file__).resolve().parents[3] / "notebooks" / "results"
EXAMPLES = """\
examples:
  python -m minillm_kernels.bench                       everything, within 8 minutes
  python -m minillm_kernels.bench fused mla             two families
  python -m minillm_kernels.bench --quick               a first impression, within 2 minutes
  python -m minillm_kernels.bench --json h200.json      write the numbers there
  python -m minillm_kernels.bench --list                what would be measured; needs no GPU

exit codes: 0 everything was measured (missed targets are results), 1 a measurement failed,
2 the benchmark cannot run here, 130 interrupted.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m minillm_kernels.bench",
        description=(
            "Measure the kernels and other implementations of the same in turn, against the copy "
            "bandwidth and the bf16 matmul rate of this GPU, measured in the same run. Needs an "
            "NVIDIA GPU of compute capability 8.0 or newer, and no network."
        ),
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    names = ", ".join(families.FAMILIES)
    made.add_argument("family", nargs="*", metavar="FAMILY", help=f"{names} (default: all)")
    made.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="where to write the numbers (default: notebooks/results/<gpu>.json of the checkout)",
    )
    made.add_argument("--quick", action="store_true", help="few repetitions")
    made.add_argument("--list", action="store_true", help="what would be measured, and stop")
    made.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"time for all measurements (default: {SECONDS:.0f}, --quick: {QUICK_SECONDS:.0f})",
    )
    return made


def main(
    arguments: Sequence[str] | None = None,
    start: Callable[[Job], Worker] = Process,
    require: Callable[[], None] = require_gpu,
) -> int:
    """Run the command and return its exit code; tests give it a `start` that needs no GPU."""
    options = parser().parse_args(arguments)
    try:
        wanted = families.chosen(options.family)
        if options.seconds is not None and not 0 < options.seconds < 1e6:
            raise ValueError(f"--seconds is {options.seconds}; it must be a number above 0.")
        if options.list:
            sys.stdout.write(listed(wanted))
            return 0
        require()
        target(options.json, "gpu")  # before eight minutes have passed
    except (ValueError, NoGpuError, OSError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return _measure(options, wanted, start)


def _measure(
    options: argparse.Namespace,
    wanted: tuple[str, ...],
    start: Callable[[Job], Worker],
) -> int:
    begun = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - begun:4.0f} s] {text}\n")
        sys.stderr.flush()

    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    job = Job(wanted, seconds, quick=options.quick)
    run = Supervisor(job, start, time.monotonic, say).go()
    if not run.gpu:
        sys.stderr.write(f"The benchmark could not start: {run.stopped}\n")
        return 2
    found = report.as_json(run, date.today(), options.quick)
    sys.stdout.write(report.as_text(found))
    file = target(options.json, str(run.gpu["name"]))
    report.write(found, file)
    sys.stdout.write(f"\nThe numbers are in {file}.\n")
    if run.stopped == "interrupted":
        return 130
    return 1 if any(result.error for result in run.results) else 0


def target(file: Path | None, gpu: str) -> Path:
    """Where the numbers go; ValueError if there is no such place."""
    if file is None:
        if not RESULTS.is_dir():
            raise ValueError(
                "minillm_kernels does not run from minillm's repository here, so there is no "
                "notebooks/results: say --json FILE."
            )
        return RESULTS / f"{report.slug(gpu)}.json"
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"--json {file}: this is a folder, or its folder does not exist.")
    return file


def listed(wanted: Sequence[str]) -> str:
    """Families and their measurements, one per line."""
    lines = [f"{family}\n" + "".join(f"  {name}\n" for name in names(family)) for family in wanted]
    return "".join(lines)


def names(family: str) -> list[str]:
    """Of a family's measurements; of the toy-sized ones where the inputs of the others do not fit.

    Most families make their inputs when they are first needed, so that their list costs nothing.
    """
    try:
        return [each.name for each in families.measurements(family)]
    except (RuntimeError, AssertionError):  # no CUDA here, or too little memory
        return [f"{each.name} (toy size)" for each in families.measurements(family, tiny=True)]


if __name__ == "__main__":
    raise SystemExit(main())
