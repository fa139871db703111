"""Runs the HTTP API with uvicorn: the engine, signals, draining, and the end."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from minillm.api.arguments import AsyncEngineArgs
from minillm.serving.app import Server, build_app
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.serving.settings import Settings

logger = logging.getLogger(__name__)

GIB = 2**30
ERROR_SECONDS = 1.0  # time for error replies after the engine has died
POLL_SECONDS = 0.2
SWITCH_SECONDS = 0.0001


def load(arguments: Mapping[str, Any], disable_log_stats: bool) -> AsyncLLMEngine:
    """Load the model and start its step thread."""
    return AsyncLLMEngine(AsyncEngineArgs(disable_log_stats=disable_log_stats, **arguments))


def memory_line(engine: AsyncLLMEngine) -> str:
    """The memory plan in one line."""
    memory = engine.state().memory
    return (
        f"Memory: weights {memory.weight_bytes / GIB:.2f} GiB, activations "
        f"{memory.activation_bytes / GIB:.2f} GiB, KV cache {memory.kv_cache_bytes / GIB:.2f} GiB "
        f"({memory.num_tokens:,} tokens; a request has at most {engine.max_model_len:,})"
    )


@contextmanager
def quick_switches() -> Iterator[None]:
    """Context in which a thread that waits for the interpreter gets it after `SWITCH_SECONDS`.

    The step thread gives the interpreter up for each C function, and needs it back afterwards.
    Writing one event to each of 64 streams takes the event loop about 3 ms. With Python's default
    of 5 ms the step would wait for all of it, with both cores idle.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def serve(
    engine: AsyncLLMEngine, settings: Settings, listening: socket.socket, say: Callable[[str], None]
) -> int:
    """Serve until a signal or the engine's end; returns the exit code."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    server = HttpServer(
        build_app(engine, settings),
        settings.shutdown_timeout,
        lambda: say(f"Listening on http://{shown}:{port} (Ctrl-C to stop)"),
    )
    with quick_switches():
        server.run(sockets=[listening])
    return 1 if server.failed else 0


class HttpServer(uvicorn.Server):
    """uvicorn's server, which drains: the first SIGTERM or Ctrl-C refuses new requests, finishes
    the others until `drain_seconds` have passed, and ends; a second one aborts the others, and a
    third one does not wait for their replies."""

    def __init__(self, app: FastAPI, drain_seconds: float, when_ready: Callable[[], None]):
        super().__init__(
            uvicorn.Config(
                app,
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )
        self.parts: Server = app.state.server
        self.drain_seconds, self.when_ready = drain_seconds, when_ready
        self.failed = False  # the engine died
        self._stopping = self._aborting = False
        self._tasks: list[asyncio.Task[None]] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; at the second signal, abort what runs; at the third, end at once."""
        if self._aborting:
            self.should_exit = self.force_exit = True
        self._aborting = self._stopping
        self._stopping = self.parts.gate.draining = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and watch for signals and for the engine's end."""
        await super().startup(sockets)
        self._tasks = [asyncio.create_task(self._watch())]
        self.when_ready()

    async def _watch(self) -> None:
        engine, gate = self.parts.engine, self.parts.gate
        while not self._stopping and engine.is_running:
            await asyncio.sleep(POLL_SECONDS)
        if not engine.is_running:
            self.failed = True
            logger.error("The server stops: %s", engine.dead_error)
            await asyncio.sleep(ERROR_SECONDS)
        else:
            logger.warning(
                "The server finishes %d sequences, for at most %g s; a second signal aborts them.",
                gate.num_open, self.drain_seconds,
            )  # fmt: skip
            end = asyncio.get_running_loop().time() + self.drain_seconds
            while gate.num_open and engine.is_running:
                if self._aborting or asyncio.get_running_loop().time() > end:
                    await self._abort()
                    break
                await asyncio.sleep(POLL_SECONDS / 4)
        self.should_exit = True

    async def _abort(self) -> None:
        """Abort all sequences, and wait a moment for the error replies of their requests."""
        gate, clock = self.parts.gate, asyncio.get_running_loop().time
        logger.warning("The server aborts %d sequences.", gate.num_open)
        end = clock() + ERROR_SECONDS
        with suppress(Exception):
            await asyncio.wait_for(self.parts.engine.abort_all(), ERROR_SECONDS)
        while gate.num_open and clock() < end:
            await asyncio.sleep(POLL_SECONDS / 4)
        await asyncio.sleep(POLL_SECONDS)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM and SIGINT while the server runs; afterwards the signals are not raised
        again, because draining was all that they asked for."""
        names = (signal.SIGINT, signal.SIGTERM)
        before = {name: signal.signal(name, self.handle_exit) for name in names}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
