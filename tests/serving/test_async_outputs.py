"""What streams of an AsyncLLMEngine hold with each `output_kind`, who is hurt by a text that fails,
and what serving changes in the process."""

import asyncio
import gc
import logging
from functools import reduce
from typing import Any

import pytest

from minillm import RequestOutput, SamplingParams
from minillm.api.outputs import joined
from minillm.api.sampling_params import RequestOutputKind
from minillm.engine.live_request import LiveRequest
from minillm.serving import stat_logger
from minillm.serving.request_stream import RequestStream
from tests.engine.small import reasons, tokens
from tests.serving.async_small import Gate, idle, make_async

PROMPTS = [[5 + i, 60, 7, 99 - i, 12 + 2 * i] * (1 + i % 3) for i in range(6)]
DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


def params_of(**changed: Any) -> SamplingParams:
    values = {"n": 2, "seed": 4, "max_tokens": 20, "logprobs": 1, "prompt_logprobs": 0}
    return SamplingParams(**(values | changed))


async def whole(stream: RequestStream, pause: float = 0) -> RequestOutput:
    """All deltas as one."""
    outputs = []
    async for new in stream:
        outputs.append(new)
        await asyncio.sleep(pause)
    return reduce(joined, outputs)


def told(output: RequestOutput) -> list[tuple[Any, ...]]:
    """All but the logprobs, whose last bits a batch may change; these are counted."""
    return [
        (one.text, one.token_ids, one.finish_reason, one.stop_reason, len(one.logprobs or ()))
        for one in output.outputs
    ] + [(len(output.prompt_logprobs or ()), output.finished)]


async def test_deltas_join_to_what_generate_gives(engine, llm):
    text = llm.generate(PROMPTS[:1], params_of(n=1), use_tqdm=False)[0].outputs[0].text
    settings: list[dict[str, Any]] = [
        {},
        {"stop": [text[4:6], "zz"]},
        {"stop": text[4:6], "include_stop_str_in_output": True, "min_tokens": 3},
    ]
    for setting in settings:
        right = llm.generate(PROMPTS, params_of(**setting), use_tqdm=False)
        params = params_of(**setting, output_kind=DELTA)
        for pause in (0, 0.003):
            streams = [engine.generate(p, params, str(i)) for i, p in enumerate(PROMPTS)]
            outputs = await asyncio.gather(*(whole(stream, pause) for stream in streams))
            for have, want in zip(outputs, right, strict=True):
                assert told(have) == told(want)
    await idle(engine)


async def test_a_delta_that_was_not_taken_is_joined_with_the_next(engine, llm, monkeypatch):
    """The consumer was woken, but another task keeps the loop busy until the request has ended."""
    (right,) = llm.generate(PROMPTS[:1], params_of(), use_tqdm=False)
    made, output = [], LiveRequest.output

    def counted(live: LiveRequest, delta: bool) -> RequestOutput:
        made.append(delta)
        return output(live, delta)

    monkeypatch.setattr(LiveRequest, "output", counted)
    gate = Gate(engine, monkeypatch)
    gate.shut()
    stream = engine.generate(PROMPTS[0], params_of(output_kind=DELTA), "a")
    reader = asyncio.create_task(whole(stream))
    await gate.reached()
    gate.open()
    while engine.num_unfinished or len(made) < 2:
        pass  # the loop turns no more
    assert told(await reader) == told(right)
    assert made == [True, True], "one for the waiting consumer, and the last"
    await idle(engine)


async def test_one_output_at_the_end_and_none_is_made_before(engine, llm, monkeypatch):
    (right,) = llm.generate(PROMPTS[:1], params_of(), use_tqdm=False)
    made, output = [], LiveRequest.output
    monkeypatch.setattr(
        LiveRequest, "output", lambda live, delta: made.append(live) or output(live, delta)
    )
    params = params_of(output_kind=FINAL_ONLY)
    outputs = [each async for each in engine.generate(PROMPTS[0], params, "a")]
    assert [each.finished for each in outputs] == [True]
    assert told(outputs[0]) == told(right)
    assert len(made) == 1
    await idle(engine)


async def test_the_last_delta_of_an_aborted_request(engine, monkeypatch):
    gate = Gate(engine, monkeypatch)
    gate.pace = asyncio.get_running_loop()
    params = params_of(n=1, output_kind=DELTA, max_tokens=40, ignore_eos=True)
    stream = engine.generate(PROMPTS[0], params, "a")
    first = await anext(stream)
    gate.shut()
    await gate.reached()
    (live,) = engine._engine._live.values()
    abort = asyncio.create_task(engine.abort("a"))
    await asyncio.sleep(0)
    gate.open()
    output = joined(first, await whole(stream))
    await abort
    assert reasons(output) == {"abort"}
    assert tokens(output) == [live.completions[0].token_ids]
    assert output.outputs[0].text == live.output().outputs[0].text
    await idle(engine)


def test_the_collector_is_relieved_while_an_engine_serves(folder):
    gc.unfreeze()  # what tests/conftest.py excluded
    try:
        before = gc.get_threshold()
        first, second = make_async(folder), make_async(folder)
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] > before[0]
        first.shutdown()
        second.shutdown()
        assert (gc.get_freeze_count(), gc.get_threshold()) == (0, before)
    finally:
        gc.freeze()


@pytest.mark.parametrize("disabled", [False, True])
async def test_stats_are_logged_unless_disabled(engine_of, monkeypatch, caplog, disabled):
    monkeypatch.setattr(stat_logger, "INTERVAL", 0.0)
    caplog.set_level(logging.INFO, "minillm.serving.stat_logger")
    engine = engine_of(disable_log_stats=disabled)
    async for _ in engine.generate(PROMPTS[0], params_of(n=1), "a"):
        pass
    assert bool(caplog.messages) is not disabled
    assert disabled or caplog.messages[0].startswith("1 sequences running, 0 waiting;")
