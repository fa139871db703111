"""Show a recorded trace of an engine as a web page, a text table, or in Perfetto."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

from minillm.cli.replaceable import check_replaceable
from minillm.cli.terminal import Terminal, plural, size
from minillm.errors import ConfigError, TraceFileError, did_you_mean

USAGE = "{view,table,chrome} FILE [options]"
EXAMPLES = """\
examples:
  minillm generate "def fib(n):" --trace run.jsonl   record a trace
  minillm trace view run.jsonl --open                write and open run.html
  minillm trace table run.jsonl --last 20            print one line per step
  minillm trace chrome run.jsonl                     write a file for Perfetto
"""
LAST = 40  # steps of the table
# First bytes of the files that may be overwritten.
CHROME_START = b'{"traceEvents":['


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("action", metavar="ACTION",
                        help="view (HTML page), table (text) or chrome (for "
                             "ui.perfetto.dev)")  # fmt: skip
    parser.add_argument("file", metavar="FILE", nargs="?",
                        help="the trace, from --trace or llm.trace.save()")  # fmt: skip
    parser.add_argument("-o", "--output", metavar="OUT",
                        help="output file (FILE with another suffix)")  # fmt: skip
    parser.add_argument("--open", action="store_true", help="view: open the page in a browser")
    parser.add_argument("--last", metavar="N", type=int,
                        help=f"table: number of steps, counted from the end ({LAST})")  # fmt: skip


def run(args: Namespace, terminal: Terminal) -> int:
    """Run the action, and return the exit code."""
    action = ACTIONS.get(args.action)
    if action is None:
        hint = did_you_mean(args.action, ACTIONS)
        if args.file is None and not hint:
            hint = f" The file comes after the action: 'minillm trace view {args.action}'."
        raise ConfigError(
            f"There is no action {args.action!r}; choose view, table or chrome.{hint}"
        )
    if args.file is None:
        raise ConfigError(f"There is no FILE; add one: 'minillm trace {args.action} FILE'.")
    check_options(args)
    action(args, terminal)
    return 0


def check_options(args: Namespace) -> None:
    """Reject options of other actions."""
    for option, given, owners in (
        ("--output", args.output is not None, ("view", "chrome")),
        ("--open", args.open, ("view",)),
        ("--last", args.last is not None, ("table",)),
    ):
        if given and args.action not in owners:
            raise ConfigError(
                f"{option} is for 'minillm trace {' or '.join(owners)}'; leave it out."
            )
    if args.last is not None and args.last < 1:
        raise ConfigError(f"--last is {args.last}; it must be at least 1.")


def view(args: Namespace, terminal: Terminal) -> None:
    """Write the HTML page, print its path, and with --open show it in a browser."""
    from minillm.lab.drawings.page import write_page
    from minillm.lab.drawings.timeline import timeline
    from minillm.trace.recorder import Trace

    with terminal.progress("Drawing"):
        trace = Trace.load(args.file)
        path = output(args, ".html")
        write_page(timeline(trace), path, Path(args.file).name)
    written(path, f"{plural(len(trace), 'step')}; open it in a browser", terminal)
    if args.open:
        import webbrowser

        if not webbrowser.open(path.resolve().as_uri()):
            terminal.remark("No browser could be started.")


def table(args: Namespace, terminal: Terminal) -> None:
    """Print the last steps."""
    from minillm.trace.recorder import Trace

    terminal.line(Trace.load(args.file).table(args.last or LAST))


def chrome(args: Namespace, terminal: Terminal) -> None:
    """Write the events for Perfetto."""
    from minillm.trace.recorder import Trace

    with terminal.progress("Converting"):
        trace = Trace.load(args.file)
        path = output(args, ".chrome.json")
        check_replaceable(path, CHROME_START, "no file that 'minillm trace chrome' wrote")
        try:
            trace.save_chrome(path)
        except OSError as error:
            raise TraceFileError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    written(path, "open it at ui.perfetto.dev", terminal)


ACTIONS: Mapping[str, Callable[[Namespace, Terminal], None]] = {
    "view": view, "table": table, "chrome": chrome
}  # fmt: skip


def output(args: Namespace, suffix: str) -> Path:
    """The path to write: --output, or FILE with another suffix."""
    return Path(args.output) if args.output is not None else Path(args.file).with_suffix(suffix)


def written(path: Path, what: str, terminal: Terminal) -> None:
    """Print the path to stdout and its size to stderr."""
    terminal.line(str(path))
    terminal.remark(f"{size(path.stat().st_size)}, {what}")
