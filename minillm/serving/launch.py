"""Starts the HTTP server: the engine, the application, and the end of both."""

import socket
from collections.abc import Callable, Mapping
from typing import Any

from minillm.api.arguments import AsyncEngineArgs
from minillm.serving.app import build_app
from minillm.serving.async_engine import AsyncLLMEngine
from minillm.serving.server import HttpServer
from minillm.serving.settings import Settings
from minillm.serving.threads import quick_switches

GIB = 2**30


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


def serve(
    engine: AsyncLLMEngine,
    settings: Settings,
    listening: socket.socket,
    say: Callable[[str], None],
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
