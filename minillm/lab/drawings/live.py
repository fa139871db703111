"""The trace of a running server: its latest steps, and a page that follows them."""

import time
from collections.abc import Callable
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from minillm.errors import TraceFileError
from minillm.lab.drawings.page import write_page
from minillm.lab.drawings.timeline import timeline
from minillm.trace.file import read_trace
from minillm.trace.recorder import Trace

LAST = 400  # steps
MOST_BYTES = 256 * 2**20
TIMEOUT = 30.0  # seconds


def host(url: str) -> str:
    """The server's name in titles, without what is secret in an address."""
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or "server"


def fetch(url: str, api_key: str | None = None, last: int = LAST) -> Trace:
    """The latest steps of a server that was started with ``--enable-request-trace``.

    Raises:
        TraceFileError: the server does not answer, refuses, or sends no trace.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        address = f"{url.rstrip('/')}/debug/trace?last={last}"
        with urlopen(Request(address, headers=headers), timeout=TIMEOUT) as reply:
            body = reply.read(MOST_BYTES + 1)
    except HTTPError as error:
        raise TraceFileError(f"{host(url)} refuses its trace: {refusal(error)}") from error
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise TraceFileError(f"{host(url)} cannot be reached: {reason}.") from error
    if len(body) > MOST_BYTES:
        raise TraceFileError(f"The trace of {host(url)} is too long; lower --last.")
    return read_trace(body.decode("utf-8", "replace").splitlines(), host(url))


def refusal(error: HTTPError) -> str:
    """Why a server refused, in one sentence."""
    if error.code == 401:
        return "it needs a key; add --api-key KEY."
    if error.code == 404:
        return "start it with --enable-request-trace."
    return f"status {error.code}."


def follow(
    url: str,
    path: Path,
    interval: float,
    get: Callable[[str], Trace],
    written: Callable[[Trace], None],
) -> None:
    """Write the page of a server's latest steps every `interval` seconds, until Ctrl-C.

    The page asks its browser to load it again as often. When the server no longer answers, the last
    state stays, without that request, and the error is raised.
    """
    data = None
    try:
        while True:
            trace = get(url)
            data = timeline(trace)
            write_page(data, path, host(url), reload=interval)
            written(trace)
            time.sleep(interval)
    finally:
        if data is not None:
            write_page(data, path, host(url))
