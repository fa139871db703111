"""Servers without the seconds that importing torch takes: forks of a process that has it loaded.

The first exercise that needs torch starts that process. Each server has its own input, output and
folder. The process ends with the one that started it, because the socket between them then closes.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

SECONDS = 180.0  # importing torch from a cold network disk


class Forked:
    """A server that a `Warm` process has forked; it is used like a `subprocess.Popen`."""

    def __init__(self, warm: "Warm", folder: str, checks: Path) -> None:
        (its_in, our_out), (our_in, its_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(our_out, "w", encoding="utf-8"), os.fdopen(our_in)
        try:
            order = {"folder": folder, "checks": str(checks)}
            self._id, self._warm = warm.order(order, its_in, its_out), warm
        finally:
            os.close(its_in)
            os.close(its_out)

    def kill(self) -> None:
        """End the process. No other gets its number before `wait`."""
        with suppress(OSError):
            os.kill(self._id, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for its end, which only its parent can do."""
        with suppress(OSError, ValueError):
            self._warm.order({"ended": self._id})


class Warm:
    """The process that has torch loaded (`server.fork_servers`)."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(SECONDS)
        self._turn = threading.Lock()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "minillm_exercises.server"],
                stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                cwd=environment["HOME"], env=environment,
            )  # fmt: skip
        weakref.finalize(self, _end, self._socket, self.process)

    def order(self, what: Mapping[str, object], *files: int) -> int:
        """Send a message with open files; the number of the process it is about.

        Raises:
            OSError, ValueError: the process has ended, or does not answer.
        """
        with self._turn:
            socket.send_fds(self._socket, [json.dumps(what).encode()], files)
            return int(self._socket.recv(64))


def _end(channel: socket.socket, process: "subprocess.Popen[bytes]") -> None:
    channel.close()
    process.kill()
    process.wait()


@cache
def _warm(process_id: int, environment: frozenset[tuple[str, str]]) -> Warm:
    """The warm process of this process, which may itself be a fork, and of an environment."""
    folder = tempfile.gettempdir()
    return Warm(dict(environment) | {"HOME": folder, "TMPDIR": folder})


def forked(environment: Mapping[str, str], folder: str, checks: Path) -> Forked | None:
    """A server with this environment, which may write to `folder`; None if a new interpreter has to
    be started: outside of Linux forking is not safe or not there, and a warm process may fail."""
    if sys.platform != "linux":
        return None
    try:
        return Forked(_warm(os.getpid(), frozenset(environment.items())), folder, checks)
    except (OSError, ValueError):
        _warm.cache_clear()
        return None
