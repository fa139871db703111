"""Server-sent events, and replies that end when their client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
PING = b": keep-alive\n\n"
ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
# Line ends to programs that split text by Unicode, as `str.splitlines` does.
LINE_ENDS: Mapping[int, str] = {ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}
PING_SECONDS = 15.0  # proxies close a connection on which nothing was sent for a minute


class ClientGone(Exception):
    """The client has closed its connection; nothing can be replied."""


def to_json(data: object) -> bytes:
    """Compact JSON in UTF-8, on one line."""
    text = ENCODER.encode(data)
    if not text.isascii():
        text = text.translate(LINE_ENDS)
    return text.encode("utf-8", errors="replace")


def frame(data: Mapping[str, Any]) -> bytes:
    """One event: a line of JSON."""
    return b"data: %s\n\n" % to_json(data)


async def until_gone(receive: Receive) -> None:
    """Wait until the client closes its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client leaves.

    Raises:
        ClientGone: the client has left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for waiting in (task, gone):
            if not waiting.done():
                waiting.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await waiting


class EventStream(Response):
    """A reply of events, `first` before the others. A comment is sent after `PING_SECONDS` without
    an event.

    At the end, or when the client leaves, `close` is called, even if no event was sent."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: Awaitable[bytes],
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str],
        close: Callable[[], Awaitable[None]],
    ):
        self.first, self.events, self.close = first, events, close
        self.status_code, self.background = 200, None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **headers})
        self._sending, self._last = False, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until their end, or until the client leaves."""
        tasks = [
            asyncio.create_task(call)
            for call in (self._send_all(send), until_gone(receive), self._ping(send))
        ]
        try:
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for running in tasks:
                running.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        await self._send(send, await self.first)
        async for event in self.events:
            await self._send(send, event)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, event: bytes) -> None:
        self._sending = True  # until a slow client has read enough
        await send({"type": "http.response.body", "body": event, "more_body": True})
        self._sending, self._last = False, monotonic()

    async def _ping(self, send: Send) -> None:
        self._last = monotonic()
        while True:
            await asyncio.sleep(PING_SECONDS / 3)
            if not self._sending and monotonic() - self._last > PING_SECONDS:
                await self._send(send, PING)
