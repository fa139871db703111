"""Train draft heads on text that the model writes; a stopped run continues."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from minillm.api.speculative_config import MAX_DRAFTS, TRAINED_METHODS
from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError

USAGE = "METHOD --model MODEL --out FOLDER [OPTION ...]"
EXAMPLES = """\
examples:
  minillm train medusa --model tiny --out heads
  minillm train medusa --model tiny --out heads --text prompts.txt --steps 2000
  minillm train eagle --model MODEL --minutes 60 --out layer
  minillm train eagle --model MODEL --parallel --out layer
"""
OF_HEADS = ("heads", "width")  # options of Medusa
NUMBERS = (  # option, field of the recipe, maximum, help
    ("heads", "num_heads", MAX_DRAFTS, "number of heads (4)"),
    ("width", "width", 2**16, "hidden layer of a head (that of the model)"),
    ("rows", "num_rows", 2**20, "prompts that the target continues (2112)"),
    ("steps", "steps", 2**20, "optimizer steps of 10 rows (700)"),
    ("minutes", "minutes", 2**20, "maximum CPU minutes of all steps (no maximum)"),
)


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add = parser.add_argument
    add("method", metavar="METHOD", choices=TRAINED_METHODS, help=", ".join(TRAINED_METHODS))
    add("--model", metavar="MODEL", required=True, help="the target: name, folder or hub id")
    add("--out", metavar="FOLDER", type=Path, required=True,
        help="the heads or the layer, and the run's state")  # fmt: skip
    add("--text", metavar="FILE", type=Path,
        help="UTF-8 text to take prompts from (text of the embedded models)")  # fmt: skip
    add("--parallel", action="store_true",
        help="an EAGLE layer that drafts all tokens in one pass (P-EAGLE)")  # fmt: skip
    for name, _, _, text in NUMBERS:
        add(f"--{name}", metavar="N", type=int, help=text)


def run(args: Namespace, terminal: Terminal) -> int:
    """Train, write the heads, and print their accuracy."""
    sizes = {}
    for name, field, most, _ in NUMBERS:
        if (value := getattr(args, name)) is not None:
            if not 1 <= value <= most:
                raise ConfigError(f"--{name} is {value}; it must be from 1 to {most:,}.")
            if name in OF_HEADS and args.method != "medusa":
                raise ConfigError(f"--{name} belongs to medusa; leave it out with {args.method}.")
            sizes[field] = value
    if args.parallel and args.method != "eagle":
        raise ConfigError(f"--parallel belongs to eagle; leave it out with {args.method}.")
    from minillm.lab.training.eagle import RECIPE, EagleTask
    from minillm.lab.training.heads import HeadRecipe, Task, train_heads

    recipe, kind = {
        "medusa": (HeadRecipe("medusa"), Task), "eagle": (RECIPE, EagleTask)
    }[args.method]  # fmt: skip
    recipe = replace(recipe, parallel=args.parallel, **sizes)
    card = train_heads(args.model, recipe, args.out, args.text, terminal.line, kind)
    terminal.heading(f"{args.out}  ({args.method} for {args.model})")
    terminal.line("\n  right tokens of held-out text, by temperature")
    rates = card["accuracy"]
    each = "head" if args.method == "medusa" else "draft"
    columns = ("temperature", *(f"{each} {i}" for i in range(len(rates["0"]))))
    terminal.table(columns, [(t, *(f"{r:.3f}" for r in head)) for t, head in rates.items()])
    return 0
