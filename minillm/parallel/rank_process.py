"""A rank's process as the driver sees it: how it is started, and what its end meant."""

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, NamedTuple

from minillm import errors
from minillm.errors import EngineDeadError, MinillmError
from minillm.parallel.communicator import CommunicationError
from minillm.parallel.messages import Frames

WORKER = "minillm.parallel.worker"
KEPT_LINES = 20  # of a rank's standard error


@dataclass(eq=False)
class Rank:
    """A process, and what is known of it."""

    number: int
    process: "subprocess.Popen[bytes] | Elsewhere"
    connection: socket.socket
    stderr: IO[bytes] | None
    doing: str = "starting"
    frames: Frames = field(default_factory=Frames)
    unsent: deque[memoryview] = field(default_factory=deque)
    lines: deque[str] = field(default_factory=lambda: deque([""], KEPT_LINES))
    error: tuple[str, str, str] | None = None  # type, sentence, traceback
    is_open: bool = True  # its end of the socket
    node: str = ""  # where it runs, if not as a child of this process

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs. Of one on another machine the
        end of the connection is all that is known."""
        if self.node:
            return None if self.is_open else 0
        return self.process.poll()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it, where the system tells."""
        if self.node:
            return False
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="utf-8") as file:
                return file.read().rpartition(")")[2].split()[0] in "tT"
        except OSError:
            return False

    @property
    def last_line(self) -> str:
        """What it wrote last."""
        return next((line for line in reversed(self.lines) if line.strip()), "").strip()


class Elsewhere:
    """A process of another machine, or of another parent, that ends with its connection."""

    pid = 0

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def poll(self) -> int | None:
        """Not known here: `Rank.code` looks at the connection."""
        return None

    def terminate(self) -> None:
        """Close the connection; what runs there ends."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    kill = terminate


def start(number: int, life: int, fds: Sequence[int], environment: Mapping[str, str]) -> Rank:
    """A process with a socket to this one and the reading end of its life pipe.

    It looks for modules where this process does, and in no other place (-P); a session of its own
    keeps it from a terminal's Ctrl-C.
    """
    paths = os.pathsep.join(os.path.abspath(each) for each in sys.path)
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(life)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(), life, *fds),
            env={**environment, "PYTHONPATH": paths},
            start_new_session=True,
        )
    if process.stderr is None:
        raise EngineDeadError("A rank has no standard error.")
    return Rank(number, process, ours, process.stderr)


class Death(NamedTuple):
    """Why ranks do not serve any more: the error for all who ask, made anew for each."""

    text: str
    kind: type[MinillmError] = EngineDeadError
    note: str = ""  # where it was raised

    def error(self) -> MinillmError:
        """To raise or to give to a future."""
        made = self.kind(self.text)
        if self.note:
            made.add_note(self.note)
        return made


def find_cause(ranks: Sequence[Rank], in_a_step: bool) -> Death:
    """What came first, where the ranks of a group have failed: a signal; else an error of a rank's
    own; else an exit; else silence, of which the others complain."""

    def name(rank: Rank) -> str:
        where = f" (node {rank.node})" if rank.node else ""
        return f"Rank {rank.number} of {len(ranks)}{where}"

    def key(rank: Rank) -> int:
        if rank.code is not None and rank.code < 0:
            return 0
        if rank.error is not None:
            return 1 if rank.error[0] != CommunicationError.__name__ else 4
        return 2 if rank.code is not None else 3

    rank = min(ranks, key=key)
    when = f" {rank.doing}" if rank.doing else " in a step" if in_a_step else " between two steps"
    why = f": {rank.last_line}" if rank.last_line else ""
    if key(rank) == 0:
        number = -(rank.code or 0)
        if number == signal.SIGKILL:
            why = "; Linux sends it when memory runs out"
        return Death(f"{name(rank)} was ended{when} by {signal_name(number)}{why}.")
    if rank.error is not None:
        kind, text, note = rank.error
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, MinillmError):
            return Death(text, known, f"{name(rank)}:\n{note}")
        return Death(f"{name(rank)} failed{when}: {text}", note=f"{name(rank)}:\n{note}")
    if rank.node and not rank.is_open:
        return Death(f"{name(rank)} is gone{when}: its connection has ended.")
    if rank.code is not None:
        return Death(f"{name(rank)} ended{when} with exit code {rank.code}{why}.")
    return silent([rank], len(ranks))


def silent(ranks: Sequence[Rank], size: int) -> Death:
    """Ranks that do not answer: those that are stopped, if some are."""
    stopped = [each for each in ranks if each.is_stopped]
    names = " and ".join(str(each.number) for each in stopped or ranks)
    why = " (the process is stopped)" if stopped else ""
    return Death(f"Rank {names} of {size} did not answer in time{why}, so all ranks were ended.")


def signal_name(number: int) -> str:
    """As in "SIGKILL (signal 9)"."""
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
