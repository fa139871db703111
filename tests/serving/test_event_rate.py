"""`limit_outputs`: the first and last output of a stream at once, the others together."""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from minillm import AsyncLLMEngine, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.api.sampling_params import RequestOutputKind
from minillm.serving import step_thread
from minillm.serving.request_stream import RequestStream
from minillm.serving.step_thread import StepThread
from tests.engine.small import write_model
from tests.serving.async_small import LIMIT, idle, in_thread, make_async

POLL = 0.2  # seconds between two looks whether a stream waits for nothing
PARAMS = SamplingParams(
    temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA
)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AsyncLLMEngine]:
    """An engine on whose clock a step takes one second, and which waits for slow consumers."""
    seconds, publish = [0.0], StepThread._publish

    def timed(steps: StepThread) -> None:
        seconds[0] += 1
        end = time.monotonic() + LIMIT
        while not all(each.wanted for each in list(steps._held.values())):
            assert time.monotonic() < end, "a stream does not ask for its next output"
            time.sleep(0.0005)
        publish(steps)

    monkeypatch.setattr(StepThread, "_publish", timed)
    monkeypatch.setattr(step_thread, "monotonic", lambda: seconds[0])
    engine = make_async(write_model(tmp_path))
    yield engine
    engine.shutdown()


def is_done(engine: AsyncLLMEngine) -> bool:
    """Whether every request of an engine is finished."""
    held = engine._steps._held.values()
    return not engine._steps._queue and all(each.live and each.live.finished for each in held)


async def next_output(engine: AsyncLLMEngine, stream: RequestStream) -> RequestOutput | None:
    """The next output, None after the last one. Fails if no request is left to send it."""
    task = asyncio.ensure_future(anext(stream, None))
    while not task.done():
        await asyncio.wait({task}, timeout=POLL)
        if not task.done() and await in_thread(engine, lambda: is_done(engine)):
            await asyncio.sleep(0)  # what was sent before is delivered now, and read next
            await asyncio.sleep(0)
            if not task.done():
                task.cancel()
                pytest.fail("All requests are finished, but a stream got no last output.")
    return task.result()


async def sizes(
    engine: AsyncLLMEngine, stream: RequestStream, begun: asyncio.Event | None = None
) -> list[int]:
    """New tokens of each output; `begun` is set at the first one."""
    found = []
    while (each := await next_output(engine, stream)) is not None:
        found.append(len(each.outputs[0].token_ids))
        if begun is not None:
            begun.set()
    return found


@pytest.mark.parametrize(
    ("per_second", "expected"),
    [(1e9, [1] * 12), (2 / 3, [1, 3, 3, 3, 2]), (2 / 5, [1, 5, 5, 1]), (1e-9, [1, 11])],
)
async def test_both_streams_share_the_rate(engine, per_second, expected):
    engine.limit_outputs(per_second)
    both = threading.Event()
    engine._steps.call(both.wait)  # so that both streams begin with the same step
    tasks = [
        asyncio.create_task(sizes(engine, engine.generate({"prompt_token_ids": ids}, PARAMS, name)))
        for name, ids in (("a", [5, 6, 7]), ("b", [8, 9]))
    ]
    await asyncio.sleep(0)
    both.set()
    assert await asyncio.gather(*tasks) == [expected, expected]
    await idle(engine)


async def test_a_later_stream_has_its_first_output_at_once(engine: AsyncLLMEngine) -> None:
    engine.limit_outputs(1e-9)
    begun, params = asyncio.Event(), replace(PARAMS, max_tokens=40)
    first = engine.generate({"prompt_token_ids": [5, 6]}, params, "a")
    reader = asyncio.create_task(sizes(engine, first, begun))
    await begun.wait()
    later = engine.generate({"prompt_token_ids": [8]}, PARAMS, "b")
    assert await sizes(engine, later) == [1, 11]
    assert await reader == [1, 39]
    await idle(engine)
