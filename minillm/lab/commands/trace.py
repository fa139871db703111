"""Show a recorded trace of an engine as a web page, a text table, or in Perfetto."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from minillm.cli.replaceable import check_replaceable
from minillm.cli.terminal import Terminal, plural, size
from minillm.errors import ConfigError, TraceFileError, did_you_mean
from minillm.lab.commands.bench_options import within

if TYPE_CHECKING:
    from minillm.trace.recorder import Trace

USAGE = "[{view,table,chrome}] FILE_OR_URL [options]"
EXAMPLES = """\
examples:
  minillm generate "def fib(n):" --trace run.jsonl   record a trace
  minillm trace view run.jsonl --open                write and open run.html
  minillm trace table run.jsonl --last 20            print one line per step
  minillm trace http://localhost:8000 --open         follow a running server
"""
LAST = 40  # steps of the table
INTERVAL = 2.0  # seconds between two pages of a server
# First bytes of the files that may be overwritten.
CHROME_START = b'{"traceEvents":['


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add = parser.add_argument
    add("action", metavar="ACTION",
        help="view (HTML page), table (text) or chrome (for ui.perfetto.dev)")  # fmt: skip
    add("file", metavar="FILE", nargs="?",
        help="the trace, from --trace or llm.trace.save(), or the address of a "
             "server")  # fmt: skip
    add("-o", "--output", metavar="OUT", help="output file (FILE with another suffix)")
    add("--open", action="store_true", help="view: open the page in a browser")
    add("--last", metavar="N", type=within(int, 1),
        help=f"table, server: number of steps, counted from the end ({LAST}; "
             "server: 400)")  # fmt: skip
    add("--interval", metavar="S", type=within(float, 0.1, 3600),
        help="server without ACTION: seconds between two pages (2)")  # fmt: skip
    add("--api-key", metavar="KEY", help="key of the server")


def run(args: Namespace, terminal: Terminal) -> int:
    """Run the action, and return the exit code."""
    if is_url(args.action) and args.file is None:
        args.action, args.file = "follow", args.action
    if args.action not in ACTIONS:
        hint = did_you_mean(args.action, ACTIONS)
        if args.file is None and not hint:
            hint = f" The file comes after the action: 'minillm trace view {args.action}'."
        raise ConfigError(
            f"There is no action {args.action!r}; choose view, table or chrome.{hint}"
        )
    if args.file is None:
        raise ConfigError(f"There is no FILE; add one: 'minillm trace {args.action} FILE'.")
    check_options(args)
    ACTIONS[args.action](args, terminal)
    return 0


def check_options(args: Namespace) -> None:
    """Reject options of other actions."""
    server = is_url(args.file)
    if args.action == "follow" and not server:
        raise ConfigError("follow needs the address of a server, such as http://localhost:8000.")
    if args.api_key is not None and not server:
        raise ConfigError("--api-key is for the trace of a server; leave it out.")
    for option, given, owners in (
        ("--output", args.output is not None, ("view", "chrome", "follow")),
        ("--open", args.open, ("view", "follow")),
        ("--last", args.last is not None and not server, ("table",)),
        ("--interval", args.interval is not None, ("follow",)),
    ):
        if given and args.action not in owners:
            names = [action for action in owners if action != "follow"] or ["URL"]
            raise ConfigError(
                f"{option} is for 'minillm trace {' or '.join(names)}'; leave it out."
            )


def view(args: Namespace, terminal: Terminal) -> None:
    """Write the HTML page, print its path, and with --open show it in a browser."""
    from minillm.lab.drawings.page import write_page
    from minillm.lab.drawings.timeline import timeline

    with terminal.progress("Drawing"):
        trace = load(args)
        path = output(args, ".html")
        write_page(timeline(trace), path, Path(args.file).name)
    written(path, f"{plural(len(trace), 'step')}; open it in a browser", terminal)
    if args.open:
        show(path, terminal)


def follow_server(args: Namespace, terminal: Terminal) -> None:
    """Write the page of a server again and again, until Ctrl-C."""
    from minillm.lab.drawings.live import follow

    path, first = output(args, ".html"), [True]

    def done(trace: "Trace") -> None:
        if first:
            first.clear()
            written(path, "it follows the server until Ctrl-C", terminal)
            terminal.flush()
            if args.open:
                show(path, terminal)

    follow(args.file, path, args.interval or INTERVAL, lambda _: load(args), done)


def show(path: Path, terminal: Terminal) -> None:
    """Open a page in a browser."""
    import webbrowser

    if not webbrowser.open(path.resolve().as_uri()):
        terminal.remark("No browser could be started.")


def table(args: Namespace, terminal: Terminal) -> None:
    """Print the last steps."""
    terminal.line(load(args).table(args.last or LAST))


def chrome(args: Namespace, terminal: Terminal) -> None:
    """Write the events for Perfetto."""
    with terminal.progress("Converting"):
        trace = load(args)
        path = output(args, ".chrome.json")
        check_replaceable(path, CHROME_START, "no file that 'minillm trace chrome' wrote")
        try:
            trace.save_chrome(path)
        except OSError as error:
            raise TraceFileError(f"{str(path)!r} cannot be written: {error.strerror}.") from error
    written(path, "open it at ui.perfetto.dev", terminal)


ACTIONS: Mapping[str, Callable[[Namespace, Terminal], None]] = {
    "view": view, "table": table, "chrome": chrome, "follow": follow_server
}  # fmt: skip


def is_url(text: str) -> bool:
    """Whether FILE is the address of a server."""
    return text.startswith(("http://", "https://"))


def load(args: Namespace) -> "Trace":
    """The trace of a file or of a running server."""
    if is_url(args.file):
        from minillm.lab.drawings import live

        return live.fetch(args.file, args.api_key, args.last or live.LAST)
    from minillm.trace.recorder import Trace

    return Trace.load(args.file)


def output(args: Namespace, suffix: str) -> Path:
    """The path to write: --output, or FILE with another suffix."""
    if args.output is not None:
        return Path(args.output)
    return Path(f"server{suffix}") if is_url(args.file) else Path(args.file).with_suffix(suffix)


def written(path: Path, what: str, terminal: Terminal) -> None:
    """Print the path to stdout and its size to stderr."""
    terminal.line(str(path))
    terminal.remark(f"{size(path.stat().st_size)}, {what}")
