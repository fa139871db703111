"""Starts `minillm serve MODEL` on a free port for the time of the measurement."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from minillm.errors import NodeError

START_SECONDS = 600.0  # a large model takes minutes to load
STOP_SECONDS = 15.0
LAST_CHARACTERS = 400


def free_port() -> int:
    """A port that no program uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve_command(model: str, port: int, options: Sequence[str]) -> list[str]:
    """The command line of the server."""
    start = [sys.executable, "-m", "minillm", "serve"]
    return [*start, model, "--port", str(port), *options]


@contextmanager
def serving(command: Sequence[str], port: int) -> Iterator[str]:
    """Run a server until the end of the block; gives its address when it is healthy.

    Raises:
        NodeError: the server ended, or did not become healthy in time, with the last line that it
            wrote.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="minillm-serve-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        try:
            wait_until_healthy(process, url, log)
            yield url
        finally:
            stop(process)


def wait_until_healthy(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    """Wait for GET /health to return 200."""
    opener = build_opener(ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise NodeError(
                f"The server ended with exit code {process.returncode} before it was ready: "
                f"{last_line(log)}"
            )
        try:
            with opener.open(f"{url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (URLError, OSError):
            pass  # not listening yet, or still loading
        time.sleep(0.1)
    raise NodeError(f"The server was not ready after {START_SECONDS:g} seconds: {last_line(log)}")


def last_line(log: Path) -> str:
    """The last line of the server's output that says something; its own ``error:`` line if there is
    one."""
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line and not line.startswith("Try '")]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["it wrote nothing."])[-1][:LAST_CHARACTERS]


def stop(process: "subprocess.Popen[bytes]") -> None:
    """End the server: SIGTERM, which lets it finish, then SIGKILL for its process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
