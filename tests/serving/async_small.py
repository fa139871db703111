"""An asynchronous engine around the tiny model of `tests/engine/small.py`, and hooks into its
thread."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.engine.loop import Engine
from minillm.serving import async_engine
from minillm.serving.request_stream import RequestStream
from tests.engine.small import BLOCK_SIZE, assert_idle

LIMIT = 300  # seconds; what takes longer hangs
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def make_async(folder: Path, **arguments: Any) -> AsyncLLMEngine:
    """An engine with small blocks, so that short prompts have several."""
    defaults = {"dtype": "float32", "block_size": BLOCK_SIZE, "num_gpu_blocks_override": 64}
    args = AsyncEngineArgs(folder, **(defaults | {"max_model_len": 64} | arguments))
    return AsyncLLMEngine.from_engine_args(args)


def run(main: Coroutine[Any, Any, Any], limit: float = LIMIT) -> Any:
    """Run a coroutine in a new event loop; a hang is a failure."""

    async def limited() -> Any:
        async with asyncio.timeout(limit):
            result = await main
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"
        return result

    return asyncio.run(limited())


async def collect(stream: RequestStream) -> list[RequestOutput]:
    """All outputs of a stream, each of which goes on where the one before it ended."""
    outputs: list[RequestOutput] = []
    async for output in stream:
        assert not outputs or not outputs[-1].finished
        if outputs:
            for before, now in zip(outputs[-1].outputs, output.outputs, strict=True):
                assert now.token_ids[: len(before.token_ids)] == before.token_ids
                assert now.text.startswith(before.text)
        outputs.append(output)
    assert outputs[-1].finished
    return outputs


async def last(stream: RequestStream) -> RequestOutput:
    """The last output of a stream."""
    return (await collect(stream))[-1]


async def in_thread(engine: AsyncLLMEngine, function: Callable[[], Any]) -> Any:
    """Run a function in the step thread, between two steps."""
    return await asyncio.wrap_future(engine._steps.call(function))


async def idle(engine: AsyncLLMEngine) -> None:
    """Nothing is left of any request."""
    await in_thread(engine, lambda: assert_idle(engine._engine))
    steps = engine._steps
    assert (steps._tickets, steps._queue, steps._held) == ({}, [], {})
    assert engine.num_unfinished == 0


def hold_tokeniser(patch: pytest.MonkeyPatch, name: str) -> tuple[threading.Event, threading.Event]:
    """The prompt "long" is tokenised in a thread, where the request `name` sets the first event and
    waits for the second."""
    entered, go, make_request = threading.Event(), threading.Event(), Engine.make_request

    def slow(self: Engine, request_id: str, *rest: Any) -> Any:
        if request_id == name:
            entered.set()
            assert go.wait(LIMIT)
        return make_request(self, request_id, *rest)

    patch.setattr(Engine, "make_request", slow)
    patch.setattr(async_engine, "is_long", lambda text, ids: text == "long")
    return entered, go


class Gate:
    """Stops the step thread before a step, until it is opened. With a `pace` every step waits until
    that event loop has done all that it has to do, so that a reader misses nothing."""

    def __init__(self, engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch):
        self.closed, self._go, self._step = (
            threading.Event(),
            threading.Event(),
            engine._engine.step,
        )
        self.pace: asyncio.AbstractEventLoop | None = None
        self._go.set()
        monkeypatch.setattr(engine._engine, "step", self._gated)

    def _gated(self) -> Any:
        if self.pace:
            in_loop(self.pace, lambda: None)
        if not self._go.is_set():
            self.closed.set()
            assert self._go.wait(LIMIT)
        return self._step()

    def shut(self) -> None:
        """From the next step on."""
        self.closed.clear()
        self._go.clear()

    def open(self) -> None:
        """Let it go on."""
        self._go.set()

    async def reached(self) -> None:
        """The thread stands before a step."""
        assert await asyncio.to_thread(self.closed.wait, LIMIT)


def in_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Called in the step thread: run a function in the event loop, let everything that it wakes
    run, too, and only then return."""
    done = threading.Event()

    def later(rounds: int) -> None:
        if rounds:
            loop.call_soon(later, rounds - 1)
        else:
            done.set()

    def start() -> None:
        function()
        later(5)

    loop.call_soon_threadsafe(start)
    assert done.wait(LIMIT), "the event loop does not answer"
