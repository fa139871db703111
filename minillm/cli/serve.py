"""Serve a model over HTTP, with OpenAI's and vLLM's routes.

The page http://localhost:8000/ is a playground. Ctrl-C or SIGTERM finishes the
running requests; a second one aborts them.
"""

import io
import json
import os
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import suppress
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

from minillm.cli.options import (
    add_engine_options,
    add_model_options,
    chosen_model,
    engine_arguments,
)
from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.serving.settings import Settings

USAGE = "[MODEL] [options]"
EXAMPLES = """\
examples:
  minillm serve                         the embedded model on port 8000
  minillm serve smollm2                 a chat model, downloaded once
  minillm serve preset:smollm2-135m --load-format dummy
  minillm serve PATH_TO_A_HF_FOLDER -tp 2 --api-key SECRET --host 0.0.0.0
"""


def listed(text: str) -> list[str]:
    """The names of one argument: a plain name, or vLLM's JSON list."""
    with suppress(ValueError):
        names = json.loads(text) if text.lstrip().startswith("[") else [text]
        if all(isinstance(name, str) for name in names):
            return list(names)
    raise ArgumentTypeError(f"{text!r} is neither a name nor a JSON list of names")


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of this command."""
    add_model_options(parser, "name, folder or hub id (tiny)")
    group = parser.add_argument_group("server")
    option = group.add_argument
    option("--host", metavar="HOST", default="127.0.0.1",
           help="address to listen on; 0.0.0.0 is every network (127.0.0.1)")  # fmt: skip
    option("--port", metavar="N", type=int, default=8000, help="port (8000); 0: a free one")
    option("--api-key", metavar="KEY", action="append", default=[],
           help="key that clients must send; may be repeated (environment variable "
                "MINILLM_API_KEY, which other users of the machine cannot see)")  # fmt: skip
    option("--served-model-name", metavar="NAME", nargs="+",
           help="names of the model in requests and replies (MODEL)")  # fmt: skip
    option("--chat-template", metavar="FILE", type=Path, help="Jinja template of conversations")
    option("--trust-request-chat-template", action="store_true",
           help="let requests bring a chat_template, whose time is not limited")  # fmt: skip
    option("--max-waiting", metavar="N", type=int, default=256,
           help="sequences that may wait for a place in the batch; further requests get "
                "503 (256)")  # fmt: skip
    option("--max-event-rate", metavar="N", type=float, default=1000.0,
           help="events per second over all streams; above it, events have several "
                "tokens (1000)")  # fmt: skip
    option("--shutdown-timeout", metavar="S", type=float, default=30.0,
           help="seconds for running requests after SIGTERM (30)")  # fmt: skip
    option("--health-timeout", metavar="S", type=float, default=60.0,
           help="seconds without a step after which /health fails (60)")  # fmt: skip
    option("--enable-request-trace", action="store_true",
           help="answer GET /debug/requests/ID and /debug/trace: why a request waited")  # fmt: skip
    option("--disable-log-stats", action="store_true", default=None,
           help="no statistics in the log every ten seconds")  # fmt: skip
    for name, what in (("origins", "sites whose pages may use this server in a browser (CORS); "
                        "*: all (pages that this machine serves)"),
                       ("methods", "methods of such pages (*)"),
                       ("headers", "headers of such pages (*)")):  # fmt: skip
        option(f"--allowed-{name}", metavar="NAME", nargs="*", type=listed, help=what)
    option("--allow-credentials", action="store_true", help="such pages may send cookies")
    add_engine_options(parser)


def run(args: Namespace, terminal: Terminal) -> int:
    """Serve until a signal, and return the exit code."""
    args.model = chosen_model(args) or "tiny"
    arguments = engine_arguments(args)
    check(args)
    template = read_template(args.chat_template)
    settings = Settings(
        names=tuple(args.served_model_name or [args.model]),
        api_keys=tuple(args.api_key or filter(None, [os.environ.get("MINILLM_API_KEY")])),
        max_waiting=args.max_waiting,
        health_timeout=args.health_timeout,
        max_event_rate=args.max_event_rate,
        shutdown_timeout=args.shutdown_timeout,
        request_trace=args.enable_request_trace,
        chat_template=template,
        allow_credentials=args.allow_credentials,
        allowed_origins=None if args.allowed_origins is None else (*chain(*args.allowed_origins),),
        allowed_methods=(*chain(*(args.allowed_methods or [["*"]])),),
        allowed_headers=(*chain(*(args.allowed_headers or [["*"]])),),
        trust_request_chat_template=args.trust_request_chat_template,
    )
    terminal.err = Lossy(terminal.err)  # type: ignore[assignment]
    with bound_socket(args.host, args.port) as listener:
        begin = perf_counter()
        with terminal.progress("Importing"):
            launch = import_server()
        terminal.remark(phase("Imported the engine and the server", perf_counter() - begin))
        begin = perf_counter()
        with terminal.progress(f"Loading {args.model}"):
            engine = launch.load(arguments, bool(args.disable_log_stats))
        try:
            terminal.remark(phase("Loaded the model", perf_counter() - begin))
            terminal.remark(launch.memory_line(engine))
            code: int = launch.serve(engine, settings, listener, terminal.remark)
        finally:
            engine.shutdown()
    return code


class Lossy(io.TextIOBase):
    """A stream that loses lines which cannot be written, so that a full disk ends no server."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def isatty(self) -> bool:
        """Whether the lines go to a terminal."""
        return self.stream.isatty()

    def write(self, text: str) -> int:
        """Write, if that is possible."""
        with suppress(OSError):
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush, if that is possible."""
        with suppress(OSError):
            self.stream.flush()


def phase(what: str, seconds: float) -> str:
    """A line about one phase of the start."""
    return f"{what:<36}{seconds:7.2f} s"


def check(args: Namespace) -> None:
    """Check the server's own options.

    Raises:
        ConfigError: an option is out of its range.
    """
    for name, most, shown in (
        ("port", 65535, "65535"), ("max_waiting", 1_000_000, "1,000,000"),
        ("shutdown_timeout", 86_400, "86,400 seconds"),
        ("health_timeout", 86_400, "86,400 seconds"),
    ):  # fmt: skip
        value, option = getattr(args, name), name.replace("_", "-")
        if not 0 <= value <= most:
            raise ConfigError(f"--{option} is {value}; it must be from 0 to {shown}.")
    if not args.max_event_rate > 0:
        raise ConfigError(f"--max-event-rate is {args.max_event_rate}; it must be above 0.")
    if any(not key for key in args.api_key):
        raise ConfigError("--api-key is empty; give a key, or leave the option out.")


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to an address. It is bound before the model is loaded, and does not listen,
    so that an address in use is known at once and a client is refused until the model is ready.

    Raises:
        ConfigError: the address cannot be used.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except (OSError, OverflowError) as error:
        why = str(getattr(error, "strerror", None) or error)
        raise ConfigError(
            f"The server cannot use host {host!r} with port {port}: {why}; choose another "
            "--host or --port."
        ) from None
    return made


def read_template(file: Path | None) -> str | None:
    """The text of --chat-template."""
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"--chat-template {str(file)!r} cannot be read: {why}.") from None


def import_server() -> Any:
    """The module that starts the server; its packages are an extra of the installation.

    Raises:
        UnsupportedFeatureError: one of them is missing.
    """
    try:
        from minillm.serving import launch
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("minillm"):
            raise
        raise UnsupportedFeatureError(
            f"minillm serve needs the package {error.name}; install it with "
            f"{sys.executable} -m pip install 'minillm-course[serve]'."
        ) from None
    return launch
