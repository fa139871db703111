"""Compare quantised versions of a model: quality, bytes and decode speed."""

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from minillm.api.arguments import check_kv_cache_dtype
from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError
from minillm.lab.commands.bench import check_file, progress
from minillm.lab.commands.bench_options import within

USAGE = "MODEL A [B C ...] [options]"
EXAMPLES = """\
A, B, C are folders, .gguf files, or methods that are applied to MODEL:
  int8, int4              as generate --quantization: output matrix in 8 bits
  rtn:BITS:GROUP          round to nearest, 2 to 8 bits; also gptq:..., awq:...
  nf4, fp8, fp8:row, smoothquant
  words after a colon     sym, act-order, static-groups, no-clip, no-double,
                          row (a scale per row), head8, head16, a8

The change of bits per byte and the KL divergence are paired: all models score
the same windows. Speed needs an otherwise idle machine.

examples:
  minillm compare tiny int8 int4 nf4
  minillm compare tiny rtn:4:128 gptq:4:128 --no-speed --plot quality.svg
  minillm compare MODEL MODEL-gptq model.gguf --text article.txt --json out.json
  minillm compare preset:smollm2-135m int8 int4
"""
WINDOWS, LENGTH = 40, 512


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add, count = parser.add_argument, within(int, 1)
    add("model", metavar="MODEL", help="the 16-bit model: embedded name, folder, hub id, preset")
    add("candidates", metavar="A", nargs="+", help="folders, .gguf files or methods, see below")
    add("--text", metavar="FILE", type=Path,
        help="UTF-8 text that no model was trained on (held-out standard library)")  # fmt: skip
    add("--windows", metavar="N", type=count, default=WINDOWS, help=f"windows ({WINDOWS})")
    add("--length", metavar="N", type=count, default=LENGTH, help=f"tokens of a window ({LENGTH})")
    add("--calibration", metavar="FILE", type=Path,
        help="text for gptq, awq and smoothquant (a sample of the embedded models' "
             "training text)")  # fmt: skip
    add("--samples", metavar="N", type=count, default=64, help="calibration windows of 512 (64)")
    add("--seeds", metavar="N", type=count, default=1,
        help="calibration samples to repeat calibrated methods with (1)")  # fmt: skip
    add("--no-speed", action="store_true", help="measure quality and sizes only")
    add("--dtype", metavar="DTYPE", default="auto", choices=("auto", "bfloat16", "float32"),
        help="of the measured speed and KL run: auto, bfloat16, float32 (auto)")  # fmt: skip
    add("--kv-cache-dtype", metavar="NAME", default="auto",
        help="KV cache of the measured speed and KL run: auto, int8 (auto)")  # fmt: skip
    add("--threads", metavar="N", type=count, help="threads (all processors)")
    add("--json", metavar="FILE", help="write all numbers to FILE")
    add("--plot", metavar="FILE", help="draw quality and speed against bytes (.png, .svg, .pdf)")


def run(args: Namespace, terminal: Terminal) -> int:
    """Compare, print the tables, and return the exit code."""
    check(args)
    from minillm.lab.comparison.candidates import parse
    from minillm.lab.comparison.run import Work, compare
    from minillm.lab.comparison.table import show
    from minillm.plan import machine

    work = Work(
        args.model,
        tuple(parse(name) for name in args.candidates),
        args.text,
        args.windows,
        args.length,
        args.calibration,
        args.samples,
        seeds=tuple(range(args.seeds)),
        speed=not args.no_speed,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        threads=args.threads or machine.cpu_count(),
    )
    with progress(terminal) as say:
        result = compare(work, say)
    show(result, terminal)
    if args.json is not None:
        Path(args.json).write_text(json.dumps(result) + "\n", "utf-8")
    if args.plot is not None:
        from minillm.lab.comparison.plot import draw

        draw(result, args.plot)
    return 0


def check(args: Namespace) -> None:
    """Reject options that cannot work, before models are loaded."""
    check_kv_cache_dtype(args.kv_cache_dtype)
    if args.no_speed and args.model.startswith("preset:"):
        raise ConfigError(
            f"{args.model} has random weights, so only speed can be measured; leave --no-speed out."
        )
    repeated = [name for name in args.candidates if args.candidates.count(name) > 1]
    if repeated:
        raise ConfigError(f"{repeated[0]} is given twice; leave one out.")
    check_file("--json", args.json)
    check_file("--plot", args.plot)
    from minillm.lab.benchmarks.plotting import check_plot

    check_plot(args.plot)
