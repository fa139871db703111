"""Lend this machine's processor to an engine on another one, as one of its ranks."""

import os
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError

SECONDS_TO_END = 10.0  # that the first rank has after the command
USAGE = "(--connect HOST:PORT | COMMAND ...) [options]"
EXAMPLES = """\
MINILLM_SECRET_FILE names, on every node, a copy of one file with a secret, such
as `openssl rand -hex 32` writes. The engine waits for ranks with the options
--distributed-executor-backend external --master-addr HOST, and shows its port.
Under torchrun every node has the same command, and the first runs the engine.

examples:
  minillm node --connect 10.0.0.1:41234              one rank of that engine
  minillm node --connect 10.0.0.1:41234 --model DIR  its model is elsewhere here
  torchrun ... -m minillm node generate TEXT -tp 2   all ranks, and the engine
"""


def add_options(parser: ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--connect", metavar="HOST:PORT", help="where the engine waits for ranks")
    parser.add_argument("--host", metavar="HOST",
                        help="interface for other ranks (the one to the engine)")  # fmt: skip
    parser.add_argument("--rank", metavar="N", type=int, help="number of this rank (any)")
    parser.add_argument("--model", metavar="DIR",
                        help="where the model is here, if not at the same place")  # fmt: skip
    parser.add_argument("--timeout", metavar="S", type=float, default=60.0,
                        help="seconds in which the engine has to answer (60)")  # fmt: skip
    parser.add_argument("command_of_the_first", metavar="COMMAND", nargs=REMAINDER,
                        help="under torchrun: what the first rank's node runs")  # fmt: skip


def run(args: Namespace, terminal: Terminal) -> int:
    """Serve until the engine closes; the first rank of torchrun also runs the engine."""
    from minillm.parallel.handshake import read_secret

    secret, rank = read_secret(), args.rank
    command = args.command_of_the_first
    if args.connect is None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError("Say where the engine is with --connect HOST:PORT, or use torchrun.")
        rank = int(os.environ["RANK"])
        if command and rank == 0:
            return run_first(command)
    from minillm.parallel.node import serve_rank
    from minillm.parallel.nodes import published

    address = args.connect or published()
    serve_rank(address, secret, args.host, rank, args.model, args.timeout)
    return 0


def run_first(command: list[str]) -> int:
    """The engine in this process, and the first rank in another."""
    from minillm.cli.app import run as run_command

    ours = ["--distributed-executor-backend", "external"]
    with subprocess.Popen([sys.executable, "-m", "minillm", "node"]) as rank:
        try:
            code = run_command([*command, *ours, "--master-addr", os.environ["MASTER_ADDR"]])
            with suppress(subprocess.TimeoutExpired):
                rank.wait(SECONDS_TO_END)
            return code
        finally:  # it may wait for an engine that was not made
            rank.terminate()
