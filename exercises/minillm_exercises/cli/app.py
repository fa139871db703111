"""What every command gets, and which function a command is."""

import io
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from rich.console import Console, RenderableType

from minillm_exercises.cli.parser import TEACH, build_parser
from minillm_exercises.explain import Shell
from minillm_exercises.session import Session
from minillm_exercises.workspace import shown_path, writing


def terminal() -> Console:
    """Standard output: colours only at a terminal (and not with NO_COLOR), no guessed markup."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a message may hold any character
    return Console(file=sys.stdout, highlight=False, markup=False, emoji=False)


@dataclass(frozen=True)
class App:
    """A session at a terminal; `ask` puts a question and returns the answer, `wait` sleeps."""

    session: Session = field(default_factory=Session.open)
    out: Console = field(default_factory=terminal)
    shell: Shell = field(default_factory=Shell.here)
    ask: Callable[[str], str] = input
    wait: Callable[[float], object] = time.sleep

    def show(self, *what: RenderableType | str) -> None:
        """Write lines or anything that rich can draw."""
        for item in what:
            self.out.print(item, soft_wrap=isinstance(item, str))

    def aside(self, line: str) -> None:
        """Write a line that is no part of the result, and so not into a pipe."""
        sys.stderr.write(line + "\n")

    def write(self, path: Path | str, text: str) -> None:
        """Write a file that was asked for, and say so."""
        path = Path(path)
        with writing(path):
            path.write_text(text, encoding="utf-8", errors="backslashreplace")
        self.aside(f"Written: {shown_path(path)}")


Command = Callable[[Namespace, App], int]


def run(argv: Sequence[str] | None, app: App | None) -> int:
    """Parse what was typed and run it."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:  # --help, or a mistake that was already reported
        return int(stop.code or 0)
    if args.command is None:
        parser.print_help()
        return 0
    app = App() if app is None else app
    if notice := app.session.progress().notice:
        app.aside(notice)
    return _command(args.command)(args, app)


def _command(name: str) -> Command:
    """The function of that name; each module is only imported when a command of it runs."""
    module = "teach" if name in (*TEACH, "report") else "learn"
    return getattr(import_module(f"minillm_exercises.cli.{module}"), f"command_{name}")
