"""Calls of an ASGI application without a socket; a client may leave in the middle of a stream."""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI


@dataclass
class Reply:
    """A response: its status, its headers, and the parts of its body."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return b"".join(self.parts).decode()

    def json(self) -> Any:
        return json.loads(self.text)

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream, without the last one, which is [DONE]."""
        lines = [each[6:] for each in self.text.split("\n\n") if each.startswith("data: ")]
        return [json.loads(each) for each in lines if each != "[DONE]"]


async def call(
    app: FastAPI,
    path: str,
    body: Mapping[str, Any] | None = None,
    headers: Mapping[str, str] | None = None,
    leave_after: int | None = None,
    on_part: Callable[[], object] = lambda: None,
) -> Reply:
    """POST a JSON body, or GET without one. With `leave_after` the client closes the connection
    after that many parts of the response. `on_part` is called when a part has arrived."""
    path, _, query = path.partition("?")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "GET" if body is None else "POST", "path": path, "raw_path": path.encode(),
        "query_string": query.encode(), "root_path": "", "server": ("test", 80),
        "client": ("test", 1), "state": {},
        "headers": [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()],
    }  # fmt: skip
    reply, left = Reply(), asyncio.Event()
    sent = [json.dumps(body).encode() if body is not None else b""]

    async def receive() -> dict[str, Any]:
        if sent:
            return {"type": "http.request", "body": sent.pop(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Mapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            reply.status = message["status"]
            reply.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message.get("body"):
            reply.parts.append(message["body"])
            on_part()
        if leave_after is not None and len(reply.parts) >= leave_after:
            left.set()

    await app(scope, receive, send)
    return reply
