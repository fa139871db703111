"""Quantise a model into a new folder, layer by layer; a stopped run continues.

With --type, write a GGUF file.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from minillm.cli.terminal import Terminal, size
from minillm.errors import ConfigError
from minillm.lab.quantise.recipe import CALIBRATED, FORMATS, GROUPED, METHODS, SETTINGS, Recipe

if TYPE_CHECKING:
    from torch import Tensor

    from minillm.lab.quantise.quantize_folder import Report
    from minillm.models.checkpoint import ModelSource

USAGE = "MODEL [--method METHOD | --type TYPE] --out PATH"
EXAMPLES = """\
examples:
  minillm quantize tiny --method gptq --out tiny-gptq
  minillm quantize MODEL --method gptq --act-order --group-size 32 --out OUT
  minillm quantize MODEL --method awq --format awq --calibration FILE --out OUT
  minillm quantize MODEL --type Q8_0 --out MODEL.gguf
"""
SAMPLES, LENGTH = 64, 512


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    formats = sorted({name for names in FORMATS.values() for name in names})
    add = parser.add_argument
    add("model", metavar="MODEL", help="embedded name, folder or hub id, unquantised")
    add("--method", metavar="METHOD", help=f"{', '.join(METHODS)} (rtn with --type)")
    add("--out", metavar="FOLDER", type=Path, required=True,
        help="new or empty folder; with --type, a new file")  # fmt: skip
    add("--type", metavar="TYPE",
        help="write a GGUF file: Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, BF16, F16 or F32")  # fmt: skip
    add("--bits", metavar="N", type=int, help="rtn, gptq, awq: bits of a code (4)")
    add("--group-size", metavar="N", type=int,
        help="inputs that share a scale; -1: whole rows (the largest of 128, 64, 32 that "
             "divides all rows)")  # fmt: skip
    sign = parser.add_mutually_exclusive_group()
    sign.add_argument("--sym", action="store_true", help="rtn, gptq, awq: without zero points")
    sign.add_argument("--asym", action="store_true", help="with zero points (default)")
    add("--act-order", action="store_true", help="gptq: columns with the largest inputs first")
    add("--static-groups", action="store_true", help="gptq: scales from the original weights")
    add("--damp", metavar="X", type=float, help="gptq: added share of the mean diagonal (0.01)")
    add("--no-clip", action="store_true", help="awq: no search for smaller ranges")
    add("--alpha", metavar="X", type=float, help="smoothquant: share moved into weights (0.5)")
    add("--no-double", action="store_true", help="nf4: scales in float32")
    add("--head", action="store_true",
        help="the output matrix in 8 bits (compressed-tensors, not tied)")  # fmt: skip
    add("--format", metavar="FORMAT", help=f"{', '.join(formats)} (by method), or gguf")
    add("--calibration", metavar="FILE", type=Path,
        help="UTF-8 text (a sample of the embedded models' training text)")  # fmt: skip
    add("--samples", metavar="N", type=int, help=f"windows of the text ({SAMPLES})")
    add("--length", metavar="N", type=int, help=f"tokens of a window ({LENGTH})")
    add("--seed", metavar="N", type=int, help="draws the windows (0)")


def run(args: Namespace, terminal: Terminal) -> int:
    """Quantise, and return the exit code."""
    from minillm.lab.quantise.quantize_folder import quantize_folder
    from minillm.models.checkpoint import open_model

    if args.type is not None or args.format == "gguf":
        return write_file(args, terminal)
    recipe = recipe_of(args)
    recipe.format(args.format)
    source = open_model(args.model)
    report = quantize_folder(
        source, recipe, args.out, windows_of(args, recipe, source), args.format
    )
    describe(report, recipe, terminal)
    return 0


def write_file(args: Namespace, terminal: Terminal) -> int:
    """Write a GGUF file, and return the exit code."""
    from minillm.lab.quantise.gguf_export import write_model
    from minillm.models.checkpoint import open_model

    if args.type is None:
        raise ConfigError("A GGUF file needs --type, for example --type Q8_0.")
    if args.method not in (None, "rtn") or args.format not in (None, "gguf"):
        raise ConfigError(
            "--type writes a GGUF file, which is rounded to nearest (rtn); leave --method and "
            "--format out."
        )
    for name in ("group_size", "head", *OWNERS):
        if getattr(args, name) not in (None, False):
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --type, which gives bits and "
                "groups."
            )
    report = write_model(open_model(args.model), args.out, args.type)
    terminal.heading(f"{report.path}  (GGUF, {args.type})")
    share = report.num_bytes / report.source_bytes
    types = ", ".join(f"{size(count)} in {name}" for name, count in report.types.items())
    terminal.rows([
        ("file", f"{size(report.num_bytes)}, {share:.0%} of the original "
                 f"{size(report.source_bytes)}"),
        ("tensors", types),
    ])  # fmt: skip
    return 0


# The methods that each option belongs to.
OWNERS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "bits": GROUPED, "sym": GROUPED, "asym": GROUPED, "act_order": SETTINGS["act_order"],
    "static_groups": SETTINGS["static_groups"], "damp": SETTINGS["damp"],
    "no_clip": SETTINGS["clip"], "alpha": SETTINGS["alpha"], "no_double": SETTINGS["double"],
    "calibration": CALIBRATED, "samples": CALIBRATED, "length": CALIBRATED, "seed": CALIBRATED,
})  # fmt: skip


def recipe_of(args: Namespace) -> Recipe:
    """The recipe of the options. Raises ConfigError for an option of another method."""
    if args.method is None:
        raise ConfigError(f"Give --method: {', '.join(METHODS)}; or --type for a GGUF file.")
    given = {name: value for name, value in vars(args).items() if value not in (None, False)}
    recipe = Recipe(args.method)
    for name, owners in OWNERS.items():
        if name in given and recipe.method not in owners:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect with --method {recipe.method}; it is "
                f"for {', '.join(owners)}."
            )
    plain = ("bits", "group_size", "act_order", "static_groups", "damp", "alpha")
    return Recipe(
        args.method,
        symmetric=args.sym,
        clip=not args.no_clip,
        double=not args.no_double,
        head=args.head,
        **{name: given[name] for name in plain if name in given},
    )


def windows_of(args: Namespace, recipe: Recipe, source: "ModelSource") -> "Tensor | None":
    """The calibration text, if the method needs one."""
    from minillm.lab.quantise.calibration_text import calibration_windows, read_text
    from minillm.text.tokenizer import Tokenizer

    if not recipe.calibrated or source.folder is None:
        return None
    length = LENGTH if args.length is None else args.length
    longest = source.config.longest_context
    if length > longest:
        raise ConfigError(f"--length is {length}; the model's context is {longest} tokens.")
    samples = SAMPLES if args.samples is None else args.samples
    tokenizer = Tokenizer.from_folder(source.folder)
    return calibration_windows(
        tokenizer, read_text(args.calibration), samples, length, args.seed or 0
    )


def describe(report: "Report", recipe: Recipe, terminal: Terminal) -> None:
    """Print sizes and the errors of the layers."""
    kinds: dict[str, list[float]] = {}
    for name, error in report.errors.items():
        kinds.setdefault(name.rsplit(".", 1)[-1], []).append(error)
    share = report.num_bytes / report.source_bytes
    terminal.heading(f"{report.folder}  ({recipe.method}, {report.format})")
    sizes = f"{size(report.num_bytes)}, {share:.0%} of the original {size(report.source_bytes)}"
    groups = f"{report.group} inputs" if report.group else "whole rows"
    terminal.rows([("files", sizes), ("groups", groups)])
    of = "outputs on the calibration text" if recipe.calibrated else "weights"
    terminal.line(f"\n  relative error of {of}, over all layers")
    terminal.table(
        ("matrix", "mean", "largest"),
        [(n, f"{sum(e) / len(e):.4f}", f"{max(e):.4f}") for n, e in kinds.items()],
    )
