"""Run one rank of a multi-node engine on this machine."""

import os
import subprocess
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress

from minillm.cli.terminal import Terminal
from minillm.errors import ConfigError

SECONDS_TO_END = 10.0  # time for the first rank to exit after the command
USAGE = "(--connect HOST:PORT | COMMAND ...) [options]"
EXAMPLES = """\
Set MINILLM_SECRET_FILE on every node to a copy of the same secret file (create
it with `openssl rand -hex 32`). Start the engine with the options
--distributed-executor-backend external --master-addr HOST; it shows its port
and waits for the ranks. With torchrun, run the same command on every node; the
first rank's node also runs the engine.

examples:
  minillm node --connect 10.0.0.1:41234              join that engine
  minillm node --connect 10.0.0.1:41234 --model DIR  model in another folder
  torchrun ... -m minillm node generate TEXT -tp 2   start all ranks and engine
"""


def add_options(parser: ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument("--connect", metavar="HOST:PORT", help="address of the engine")
    parser.add_argument("--host", metavar="HOST",
                        help="interface where other ranks connect (default: the one "
                             "that reaches the engine)")  # fmt: skip
    parser.add_argument("--rank", metavar="N", type=int,
                        help="number of this rank (default: the engine chooses)")  # fmt: skip
    parser.add_argument("--model", metavar="DIR",
                        help="folder of the model here (default: the engine's)")  # fmt: skip
    parser.add_argument("--timeout", metavar="S", type=float, default=60.0,
                        help="seconds to wait for the engine (60)")  # fmt: skip
    parser.add_argument("command_of_the_first", metavar="COMMAND", nargs=REMAINDER,
                        help="with torchrun: the first node also runs this command")  # fmt: skip


def run(args: Namespace, terminal: Terminal) -> int:
    """Serve until the engine closes; the first rank of torchrun also runs the engine."""
    from minillm.parallel.handshake import read_secret

    secret, rank = read_secret(), args.rank
    command = args.command_of_the_first
    if args.connect is None:
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            raise ConfigError("Give the engine's address, --connect HOST:PORT, or use torchrun.")
        rank = int(os.environ["RANK"])
        if command and rank == 0:
            return run_first(command)
    from minillm.parallel.node import serve_rank
    from minillm.parallel.nodes import published

    address = args.connect or published()
    serve_rank(address, secret, args.host, rank, args.model, args.timeout)
    return 0


def run_first(command: list[str]) -> int:
    """Run the engine in this process and the first rank in a child process."""
    from minillm.cli.app import run as run_command

    ours = ["--distributed-executor-backend", "external"]
    with subprocess.Popen([sys.executable, "-m", "minillm", "node"]) as rank:
        try:
            code = run_command([*command, *ours, "--master-addr", os.environ["MASTER_ADDR"]])
            with suppress(subprocess.TimeoutExpired):
                rank.wait(SECONDS_TO_END)
            return code
        finally:  # the rank waits forever if the engine failed to start
            rank.terminate()
