"""A client of many concurrent streams that uses little processor time.

It reads plain sockets in one thread and only looks for the end of each reply. Several streams are
read every `PAUSE` seconds: a client that wakes up for each event takes the cores from the engine
hundreds of times per second, which one on another machine does not. Events are counted and joined
after the last stream has ended. With `parse` it parses the JSON of every event as soon as
it arrives.
"""

import json
import selectors
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Any

from minillm.errors import NodeError

END = b"0\r\n\r\n"  # the last chunk of a reply
PART = 65536
PAUSE = 0.005
PATIENCE = 300.0  # seconds without anything to read


@dataclass
class Received:
    """All replies of one run."""

    start: float = 0.0  # the first connection, by `perf_counter`
    seconds: float = 0.0  # from then to the end of the last reply
    first: list[float] = field(default_factory=list)  # seconds until the first event of each
    replies: list[bytes] = field(default_factory=list)
    num_bytes: int = 0

    @property
    def events(self) -> int:
        """Events with JSON."""
        return sum(each.count(b"data: {") for each in self.replies)

    def texts(self) -> list[str]:
        """The text of each reply.

        Raises:
            NodeError: a reply is an error, or is not complete.
        """
        return [text_of(each) for each in self.replies]


def events_of(data: bytes) -> list[Any]:
    """The events in a part of a reply, without those that are not complete."""
    lines = data.split(b"\n")[:-1]
    return [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]


def text_of(reply: bytes) -> str:
    """The text of a whole reply."""
    if not reply.startswith(b"HTTP/1.1 200 ") or b"data: [DONE]" not in reply:
        raise NodeError(f"The server's reply is no complete stream: {reply[:200]!r}.")
    choices = [each for event in events_of(reply) for each in event["choices"]]
    return "".join(choice["text"] for choice in choices)


def request(prompt: Sequence[int], new_tokens: int) -> bytes:
    """One HTTP request for a greedy stream."""
    fields = {"prompt": list(prompt), "max_tokens": new_tokens, "temperature": 0}
    body = json.dumps(fields | {"ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def run_streams(
    port: int, prompts: Sequence[Sequence[int]], new_tokens: int, parse: bool
) -> Received:
    """Send all requests at once, each on a connection of its own, and read all replies."""
    bodies = [request(each, new_tokens) for each in prompts]
    parts: list[list[bytes]] = [[] for _ in prompts]
    got = Received(first=[0.0] * len(prompts), start=perf_counter())
    with selectors.DefaultSelector() as selector:
        for index, body in enumerate(bodies):
            connection = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)
            connection.sendall(body)
            selector.register(connection, selectors.EVENT_READ, index)
        while selector.get_map():
            ready = selector.select(PATIENCE)
            if not ready:
                raise NodeError(f"The server sent nothing for {PATIENCE:g} seconds.")
            for key, _ in ready:
                read(key, selector, parts[key.data], got, parse)
            if len(prompts) > 1:
                sleep(PAUSE)
    got.seconds = perf_counter() - got.start
    got.replies = [b"".join(each) for each in parts]
    got.num_bytes = sum(map(len, got.replies))
    return got


def read(
    key: selectors.SelectorKey,
    selector: selectors.BaseSelector,
    parts: list[bytes],
    got: Received,
    parse: bool,
) -> None:
    """Read what has arrived on one connection."""
    connection: Any = key.fileobj
    data = connection.recv(PART)
    if data:
        parts.append(data)
        if not got.first[key.data] and b"data: " in data:
            got.first[key.data] = perf_counter() - got.start
        if parse:
            events_of(data)
    if not data or data.endswith(END):
        selector.unregister(connection)
        connection.close()
