"""Finds the command that was typed and runs it.

The commands that use the engine are modules of this package; those that explain or measure it are
in `lab/commands/`. A command is imported by its name when it is needed.
"""

import logging
import re
import sys
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import MappingProxyType
from typing import Any, NoReturn

from minillm.api.engine_args import NOT_BUILT_YET
from minillm.cli.terminal import Terminal
from minillm.errors import did_you_mean

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "generate": "continue a text",
        "chat": "talk with a model that has a chat template",
        "info": "what a model is and what it needs; what this machine is",
        "plan": "what fits into a memory, and how fast it would be",
        "bench": "how fast it is, over what is possible, beside other engines",
        "node": "lend this machine to an engine on another one",
        "trace": "what the engine did, step by step: a page, a table, Perfetto",
    }
)
IN_LAB = frozenset({"info", "plan", "bench", "trace", "demo"})
LATER = ("serve", "quantize", "inspect", "compare")
DESCRIPTION = "A language-model inference engine small enough to read."
EXAMPLES = """\
examples:
  minillm                              a demonstration: text, and its speed
  minillm generate "def fib(n):"       continue a text with the embedded model
  minillm info preset:llama-3.1-8b     what is this model?
  minillm plan preset:llama-3.1-70b    what would it need?
"""


class Parser(ArgumentParser):
    """An argument parser that reports a mistake in one sentence with the nearest right name."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=_Help, allow_abbrev=False, **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is left over here, where the command's own options are known."""
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(self._unknown(unknown[0].partition("=")[0]))
        return namespace, unknown

    def error(self, message: str) -> NoReturn:
        """Print one sentence and leave with exit code 2."""
        bad = re.match(r"argument COMMAND: invalid choice: '(.*?)' ", message)
        if bad and bad[1] in LATER:
            message = f"'{bad[1]}' is not built yet; this version has {', '.join(COMMANDS)}"
        elif bad:
            hint = did_you_mean(bad[1], COMMANDS)
            message = f"there is no command '{bad[1]}'; the commands are {', '.join(COMMANDS)}"
            message += f".{hint}"
        message = message if message.endswith(("?", ".")) else message + "."
        self.exit(2, f"error: {message}\nTry '{self.prog} --help'.\n")

    def _unknown(self, given: str) -> str:
        """Say that an argument is not known, and which one is."""
        if given.lstrip("-").replace("-", "_") in NOT_BUILT_YET:
            return f"{given} is not built yet; leave it out in this version"
        if not given.startswith("-"):
            return f"{given!r} is one argument too many; quote a text that has spaces"
        known = re.findall(r"--[a-z][\w-]*", self.format_help())
        return f"there is no option {given}.{did_you_mean(given, known)}"


class _Help(RawDescriptionHelpFormatter):
    """Help that fits 80 columns with the descriptions in one column."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=30)


def version() -> str:
    """The version of the package this module is in."""
    return str(import_module("minillm").__version__)


def command_module(name: str) -> Any:
    """The module of a command: USAGE, EXAMPLES, `add_options(parser)` and `run(args, terminal)`."""
    return import_module(f"minillm.{'lab.commands' if name in IN_LAB else 'cli'}.{name}")


def build_parser() -> Parser:
    """The parser of all commands; each command adds its own options."""
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
    """Parse and run one command; its errors come out as exceptions."""
    terminal = Terminal()
    try:
        args = build_parser().parse_args(argv)
    finally:
        terminal.flush()  # --help leaves by SystemExit, and a full disk is noticed here
    with notes_on_stderr():
        code: int = command_module(args.command or "demo").run(args, terminal)
        terminal.flush()
    return code


@contextmanager
def notes_on_stderr() -> Iterator[None]:
    """Show what libraries log or warn as one line each, while a command runs."""
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
