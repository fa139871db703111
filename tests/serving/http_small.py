"""A server in this process over a real socket, and a client that sees every byte of its replies."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minillm import AsyncLLMEngine
from minillm.api.arguments import AsyncEngineArgs
from minillm.cli.serve import bound_socket
from minillm.serving.app import Server, build_app
from minillm.serving.launch import HttpServer
from minillm.serving.settings import Settings
from tests.engine.small import BLOCK_SIZE, assert_idle, write_model

LIMIT = 60  # seconds; what takes longer hangs
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DEFAULTS = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 128}


def write_chat_model(folder: Path) -> Path:
    """The model of tests/engine/small.py with a chat template."""
    write_model(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return folder


class InProcess(HttpServer):
    """The server of `minillm serve` in a thread, which cannot handle signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are those of the test."""
        yield


@dataclass(frozen=True)
class Reply:
    """A whole reply."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        """The JSON of the body."""
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """The text of an error."""
        return self.data["error"]["message"]


class Served:
    """A running server, its engine and a client."""

    def __init__(self, engine: AsyncLLMEngine, settings: Settings):
        self.engine = engine
        self.app = build_app(engine, settings)
        self.parts: Server = self.app.state.server
        self.pool = ThreadPoolExecutor(4)  # of `begin`
        ready = threading.Event()
        listening = bound_socket("127.0.0.1", 0)
        self.port: int = listening.getsockname()[1]
        self.http = InProcess(self.app, settings.shutdown_timeout, ready.set)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.Thread(target=self._run, args=(listening,), daemon=True)
        self.thread.start()
        assert ready.wait(LIMIT)

    def _run(self, listening: socket.socket) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            with listening:
                await self.http.serve(sockets=[listening])

        asyncio.run(main())

    @property
    def url(self) -> str:
        """The address without a path."""
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> None:
        """End the server."""
        self.http.should_exit = True
        self.thread.join(LIMIT)
        assert not self.thread.is_alive(), "the server does not end"

    def stop(self) -> None:
        """End the server, then the engine."""
        self.end()
        self.engine.shutdown()

    # ---- the client ----------------------------------------------------------------------

    def connect(self) -> socket.socket:
        """A connection for hand-written bytes."""
        made = socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def post(self, path: str, fields: Mapping[str, Any], header: str = "") -> socket.socket:
        """Send a request, and return its connection; `header` ends with a line end."""
        wire, body = self.connect(), json.dumps(fields).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {len(body)}\r\n\r\n"
        wire.sendall(head.encode() + body)
        return wire

    def send(
        self, path: str, body: Any = None, method: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Reply:  # fmt: skip
        """One request on a new connection; `body` is bytes, or becomes JSON."""
        raw = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        made = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        try:
            made.request(
                method or ("GET" if raw is None else "POST"),
                path,
                raw,
                {"content-type": "application/json"} | dict(headers or {}),
            )
            got = made.getresponse()
            return Reply(got.status, {k.lower(): v for k, v in got.getheaders()}, got.read())
        finally:
            made.close()

    def begin(self, path: str, body: Any) -> "Future[Reply]":
        """Send a request in a thread; its reply is the result."""
        return self.pool.submit(self.send, path, body)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """A completion, which must succeed."""
        reply = self.send("/v1/completions", {"prompt": prompt, "temperature": 0} | fields)
        assert reply.status == 200, reply.body
        return reply.data

    def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        """A chat completion of one message, which must succeed."""
        messages = [{"role": "user", "content": text}]
        reply = self.send("/v1/chat/completions", {"messages": messages, "temperature": 0} | fields)
        assert reply.status == 200, reply.body
        return reply.data

    def stream(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The frames of a stream, whose grammar is checked."""
        reply = self.send(path, {"temperature": 0, "stream": True, **body})
        assert reply.status == 200, reply.body
        assert reply.headers["content-type"].startswith("text/event-stream")
        return frames_of(reply.body)

    # ---- the state -----------------------------------------------------------------------

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function in the step thread."""
        return self.engine._steps.call(function).result(LIMIT)

    def wait_for(self, condition: Callable[[], Any], seconds: float = LIMIT) -> None:
        """Wait until a condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the condition does not become true"
            time.sleep(0.005)

    def assert_idle(self) -> None:
        """No request, block, sequence or task is left."""
        self.wait_for(lambda: not self.engine.num_unfinished and not self.parts.gate.num_open, 20)
        self.wait_for(lambda: not self.call(lambda: self.engine._engine.has_work), 20)
        self.call(lambda: assert_idle(self.engine._engine))
        steps = self.engine._steps
        assert (steps._tickets, steps._queue, steps._held) == ({}, [], {})
        assert self.parts.gate.num_open == 0


def frames_of(raw: bytes) -> list[dict[str, Any]]:
    """The JSON of each frame but the last, which is ``[DONE]``."""
    text = raw.decode()
    assert text.endswith("\n\n"), text[-80:]
    events = [each for each in text[:-2].split("\n\n") if each != ": keep-alive"]
    for each in events:
        assert each.startswith("data: "), each
        assert "\n" not in each, each
        assert "\r" not in each, each
    assert events.pop() == "data: [DONE]"
    assert "data: [DONE]" not in events
    return [json.loads(each.removeprefix("data: ")) for each in events]


def joined(frames: list[dict[str, Any]], chat: bool = False) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for frame in frames:
        for choice in frame["choices"]:
            new = choice["delta"].get("content", "") if chat else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


@contextmanager
def serving(engine: AsyncLLMEngine, **settings: Any) -> Iterator[Served]:
    """A server of an engine, which goes on afterwards."""
    made = Served(engine, Settings(**({"names": ("small",)} | settings)))
    try:
        yield made
    finally:
        made.end()


@contextmanager
def served(
    model: str | Path, settings: Mapping[str, Any] | None = None, **arguments: Any
) -> Iterator[Served]:
    """A server of a model; it must be idle at the end unless it has died."""
    engine = AsyncLLMEngine(AsyncEngineArgs(model, **(DEFAULTS | arguments)))
    made = Served(engine, Settings(**({"names": ("small",)} | dict(settings or {}))))
    try:
        yield made
        if engine.is_running and made.thread.is_alive():
            made.assert_idle()
    finally:
        made.stop()
