"""A rank's process as the driver sees it: how it is started, and how its failure is reported."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import IO, NamedTuple

from minillm import errors
from minillm.errors import EngineDeadError, MinillmError
from minillm.parallel.communicator import CommunicationError

WORKER = "minillm.parallel.worker"


@dataclass(eq=False)
class Rank:
    """A process and its state."""

    number: int
    process: "subprocess.Popen[str] | None"  # None: of another machine, or of another parent
    connection: Connection
    stderr: IO[str] | None = None
    doing: str = "starting"
    last_line: str = ""  # of its standard error
    error: Sequence[str] | None = None  # type, message, traceback
    is_open: bool = True  # its end of the connection
    node: str = ""  # the machine of a rank that is not a child of this process

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. A rank on another machine
        counts as running until its connection ends."""
        if self.process is None:
            return None if self.is_open else 0
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, where the system tells."""
        if self.process is None:
            return False
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
                return file.read().rpartition(")")[2].split()[0] in "tT"
        except OSError:
            return False

    def end(self, number: int) -> None:
        """Send it a signal; of a rank on another machine, end the connection."""
        if self.process is None:
            hang_up(self.connection)
        else:
            self.process.send_signal(number)  # none to a process that has been waited for


def hang_up(connection: Connection) -> None:
    """End a connection also for threads that wait for it, which `close` does not."""
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def start(number: int, fds: Sequence[int], environment: Mapping[str, str]) -> Rank:
    """Start a worker that inherits a connection to this process, and `fds`.

    It imports modules from this process's paths only (-P). A session of its own keeps a terminal's
    Ctrl-C from it.
    """
    paths = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    ours, theirs = Pipe()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), *fds),
            env={**environment, "PYTHONPATH": paths},
            start_new_session=True,
            text=True,
            errors="replace",
        )
    return Rank(number, process, ours, process.stderr)


class Failure(NamedTuple):
    """Why the ranks no longer serve. Each caller gets a new exception."""

    text: str
    kind: type[MinillmError] = EngineDeadError
    note: str = ""  # the traceback of the rank

    def error(self) -> MinillmError:
        """The exception."""
        made = self.kind(self.text)
        if self.note:
            made.add_note(self.note)
        return made


def find_cause(ranks: Sequence[Rank], in_a_step: bool) -> Failure:
    """The first cause where several ranks have failed: a signal; else a rank's own error; else an
    exit; else an error about the other ranks."""

    def name(rank: Rank) -> str:
        where = f" (node {rank.node})" if rank.node else ""
        return f"Rank {rank.number} of {len(ranks)}{where}"

    def order(rank: Rank) -> int:
        if rank.code is not None and rank.code < 0:
            return 0
        if rank.error is not None:
            return 1 if rank.error[0] != CommunicationError.__name__ else 4
        return 2 if rank.code is not None else 3

    rank = min(ranks, key=order)
    when = f" {rank.doing}" if rank.doing else " in a step" if in_a_step else " between two steps"
    why = f": {rank.last_line}" if rank.last_line else ""
    if rank.code is not None and rank.code < 0:
        if rank.code == -signal.SIGKILL:
            why = "; Linux sends it when memory runs out"
        return Failure(f"{name(rank)} was ended{when} by {signal_name(-rank.code)}{why}.")
    if rank.error is not None:
        kind, text, note = rank.error
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, MinillmError):
            return Failure(text, known, f"{name(rank)}:\n{note}")
        return Failure(f"{name(rank)} failed{when}: {text}", note=f"{name(rank)}:\n{note}")
    if rank.node and not rank.is_open:
        return Failure(f"{name(rank)} is gone{when}: its connection has ended.")
    if rank.code is not None:
        return Failure(f"{name(rank)} ended{when} with exit code {rank.code}{why}.")
    return no_answer([rank], len(ranks))


def no_answer(ranks: Sequence[Rank], size: int) -> Failure:
    """The failure of ranks that do not answer; names the stopped ones only, if there are any."""
    stopped = [rank for rank in ranks if rank.is_stopped]
    names = " and ".join(str(rank.number) for rank in stopped or ranks)
    why = " (the process is stopped)" if stopped else ""
    return Failure(f"Rank {names} of {size} did not answer in time{why}, so all ranks were ended.")


def signal_name(number: int) -> str:
    """As in "SIGKILL (signal 9)"."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
