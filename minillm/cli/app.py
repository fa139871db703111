"""Parses the command line and runs the command.

Each command is one module: of this package if it uses the engine, of `lab/commands/` if it explains
or measures it. The module is imported by name.
"""

import logging
import os
import re
import sys
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

from minillm.cli.terminal import Terminal
from minillm.errors import did_you_mean

COMMANDS: Mapping[str, str] = {
    "generate": "generate text from a prompt",
    "chat": "chat with a model that has a chat template",
    "serve": "serve a model over HTTP (OpenAI's API)",
    "info": "describe a model, or list the models and this machine",
    "inspect": "show how each kind of weight is stored, and check its values",
    "plan": "predict memory use and speed, without loading the model",
    "bench": "measure speed against upper bounds and other engines",
    "compare": "compare quantised versions of a model: quality, bytes, speed",
    "quantize": "quantise the weights of a model into a new folder",
    "train": "train draft heads for a model",
    "trace": "show a recorded trace as a web page, table or Perfetto file",
}
IN_LAB = frozenset(
    {"info", "inspect", "plan", "bench", "compare", "trace", "quantize", "train", "demo"}
)
DESCRIPTION = "A language-model inference engine small enough to read."
EXAMPLES = """\
examples:
  minillm                              demo: generated text and decode speed
  minillm generate "def fib(n):"       generate with the embedded model
  minillm info preset:llama-3.1-8b     show the architecture and its memory
  minillm plan preset:llama-3.1-70b    show what fits on this machine
"""


class Parser(ArgumentParser):
    """An argument parser whose errors are one sentence and suggest the closest valid name."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Reject unknown arguments in the command's own parser, which can suggest its options."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Print one sentence and exit with code 2."""
        bad = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if bad:
            what, given, names = bad[1], bad[2], re.findall(r"[\w-]+", bad[3])
            self.check_removed(given)
            noun = {"COMMAND": "command", "WHAT": "benchmark"}.get(what)
            message = f"{what} is {given!r}; it must be one of {', '.join(names)}."
            if noun:
                message = f"there is no {noun} {given!r}; the {noun}s are {', '.join(names)}."
            message += did_you_mean(given, names)
        message = message if message.endswith(("?", ".")) else message + "."
        self.exit(2, f"error: {message}\nTry '{self.prog} --help'.\n")

    def check_removed(self, given: str) -> None:
        """Exit with the replacement of a command or option that is no more."""
        name = f"{self.prog} {given}"
        if message := import_module("minillm.lab.commands.removed").message(name):
            self.exit(2, f"error: {message}\n")

    def _unknown(self, given: str) -> str:
        """The message for an unknown argument, with the closest known option."""
        self.check_removed(given)
        if not given.startswith("-"):
            return f"{given!r} is one argument too many; put text with spaces in quotes"
        known = re.findall(r"--[a-z][\w-]*", self.format_help())
        return f"there is no option {given}.{did_you_mean(given, known)}"


class _Help(RawDescriptionHelpFormatter):
    """Help formatter with all descriptions in one column, 80 columns wide."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)


def version() -> str:
    """The installed version of minillm."""
    return str(import_module("minillm").__version__)


def command_module(name: str) -> Any:
    """The module of a command: USAGE, EXAMPLES, `add_options(parser)` and `run(args, terminal)`."""
    return import_module(f"minillm.{'lab.commands' if name in IN_LAB else 'cli'}.{name}")


def build_parser() -> Parser:
    """The argument parser of all commands; each command module adds its own options."""
    parser = Parser(prog="minillm", description=DESCRIPTION, epilog=EXAMPLES)
    parser.add_argument("--version", action="version", version=f"minillm {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, summary in COMMANDS.items():
        module = command_module(name)
        command = commands.add_parser(
            name,
            help=summary,
            usage=f"minillm {name} {module.USAGE}",
            description=module.__doc__,
            epilog=module.EXAMPLES,
        )
        module.add_options(command)
    return parser


def run(argv: Sequence[str] | None) -> int:
    """Parse the arguments and run one command; errors are raised as exceptions."""
    terminal = Terminal()
    try:
        args = build_parser().parse_args(argv)
    finally:
        terminal.flush()  # --help raises SystemExit; an output error must still be reported
    with notes_on_stderr():
        if joins_torchrun(args):
            from minillm.parallel.worker import serve_torchrun

            serve_torchrun()
            return 0
        code: int = command_module(args.command or "demo").run(args, terminal)
        terminal.flush()
    return code


def joins_torchrun(args: Namespace) -> bool:
    """Whether torchrun has started this process as a rank; in the first of its processes, which is
    the driver, the arguments say that torchrun has started the others."""
    engine = hasattr(args, "distributed_executor_backend")
    if not engine or os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        return False
    args.distributed_executor_backend = args.distributed_executor_backend or "external"
    return os.environ["RANK"] != "0" and args.distributed_executor_backend == "external"


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """While a command runs, show each library warning or log record as one ``note:`` line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("note: %(message)s"))

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        sys.stderr.write(f"note: {' '.join(str(message).split())}\n")

    logging.getLogger().addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show
            yield
    finally:
        logging.getLogger().removeHandler(handler)
