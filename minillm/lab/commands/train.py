"""Train draft heads for a model, on text that it writes itself; a stopped run continues."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from types import MappingProxyType

from minillm.api.speculative_config import HEAD_METHODS
from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError

USAGE = "METHOD --model MODEL --out FOLDER [OPTION ...]"
EXAMPLES = """\
examples:
  minillm train medusa --model tiny --out heads
  minillm generate "def fib(n):" --speculative-config \\
      '{"method": "medusa", "model": "heads", "num_speculative_tokens": 2}'
"""
LIMITS = MappingProxyType({"heads": 15, "width": 2**16, "rows": 2**20, "steps": 2**20})


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add = parser.add_argument
    add("method", metavar="METHOD", choices=HEAD_METHODS, help=", ".join(HEAD_METHODS))
    add("--model", metavar="MODEL", required=True, help="the target: name, folder or hub id")
    add("--out", metavar="FOLDER", type=Path, required=True, help="the heads, and the run's state")
    add("--text", metavar="FILE", type=Path,
        help="UTF-8 text to take prompts from (text of the embedded models)")  # fmt: skip
    add("--heads", metavar="N", type=int, help="medusa: number of heads (4)")
    add("--width", metavar="N", type=int, help="medusa: hidden layer (that of the model)")
    add("--rows", metavar="N", type=int, help="prompts that the target continues (2112)")
    add("--steps", metavar="N", type=int, help="optimizer steps of 10 rows (700)")


def run(args: Namespace, terminal: Terminal) -> int:
    """Train, write the heads, and print their accuracy."""
    names = {"heads": "num_heads", "width": "width", "rows": "num_rows", "steps": "steps"}
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        if not 1 <= value <= LIMITS[name]:
            raise ConfigError(f"--{name} is {value}; it must be from 1 to {LIMITS[name]:,}.")
    from minillm.lab.training.heads import HeadRecipe, train_heads

    recipe = HeadRecipe(args.method, **{names[name]: value for name, value in given.items()})
    card = train_heads(args.model, recipe, args.out, args.text, terminal.line)
    terminal.heading(f"{args.out}  ({args.method} for {args.model})")
    terminal.line("\n  right tokens of held-out text, by temperature")
    rates = card["accuracy"]
    columns = ("temperature", *(f"head {i}" for i in range(card["num_heads"])))
    terminal.table(columns, [(t, *(f"{r:.3f}" for r in each)) for t, each in rates.items()])
    return 0
