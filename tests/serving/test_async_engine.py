"""AsyncLLMEngine: streams, who reads them how, and who leaves."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.engine.live_request import LiveRequest
from minillm.engine.loop import Engine
from minillm.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    UnknownArgumentError,
    UnsupportedFeatureError,
)
from minillm.serving import async_engine
from tests.engine.small import EOS, reasons, tokens
from tests.serving.async_small import (
    GREEDY,
    LIMIT,
    LONG,
    Gate,
    hold_tokeniser,
    idle,
    in_thread,
    last,
    make_async,
    run,
)

PROMPTS = [[5 + i, 60, 7, 99 - i, 12 + 2 * i] * (1 + i % 3) for i in range(20)]
TEXTS = ["a text", "another text, longer", "x"]


@pytest.fixture(scope="module")
def expected(llm: LLM) -> Callable[..., list[list[int]]]:
    """The tokens that `LLM.generate` gives."""
    known: dict[Any, list[list[int]]] = {}

    def answer(prompt: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
        key = (str(prompt), params.max_tokens)
        if key not in known:
            known[key] = tokens(llm.generate([prompt], params, use_tqdm=False)[0])
        return known[key]

    return answer


# ---- streams -----------------------------------------------------------------------------------


async def test_outputs_are_those_of_llm_generate(engine, expected):
    streams = [engine.generate(p, GREEDY, str(i)) for i, p in enumerate(PROMPTS + TEXTS)]
    outputs = await asyncio.gather(*map(last, streams))
    for number, (prompt, output) in enumerate(zip(PROMPTS + TEXTS, outputs, strict=True)):
        assert output.request_id == str(number)
        assert tokens(output) == expected(prompt)
        assert output.prompt == (prompt if isinstance(prompt, str) else None)
    await idle(engine)


async def test_a_stream_is_read_once(engine):
    stream = engine.generate(PROMPTS[0], GREEDY, "a")
    async for _ in stream:
        break
    assert (await last(stream)).finished  # it goes on where it was left
    with pytest.raises(StopAsyncIteration):  # as a protocol wants it, an iterator stays at its end
        await anext(stream)
    with pytest.raises(InvalidRequestError, match="This stream has ended; call generate"):
        await last(stream)


async def test_two_readers_at_once_are_refused_and_the_first_is_not_disturbed(engine, expected):
    stream = engine.generate(PROMPTS[0], GREEDY, "a")
    first = asyncio.create_task(last(stream))
    await asyncio.sleep(0)
    with pytest.raises(InvalidRequestError, match="already being read"):
        await anext(stream)
    assert tokens(await first) == expected(PROMPTS[0])


def test_a_stream_stays_in_its_event_loop(engine):
    stream = engine.generate(PROMPTS[0], LONG, "a")

    async def begin() -> None:
        await anext(stream)

    run(begin())
    with pytest.raises(InvalidRequestError, match="another event loop"):
        run(begin())


# ---- leaving -----------------------------------------------------------------------------------


async def break_off(engine: AsyncLLMEngine, gate: Gate) -> None:
    async for _ in engine.generate(PROMPTS[0], LONG, "left"):
        break


async def close(engine: AsyncLLMEngine, gate: Gate) -> None:
    stream = engine.generate(PROMPTS[0], LONG, "left")
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def drop_a_cycle(engine: AsyncLLMEngine, gate: Gate) -> None:
    stream: Any = engine.generate(PROMPTS[0], LONG, "left")
    await anext(stream)
    stream.itself = stream
    del stream
    gc.collect()


async def cancel(engine: AsyncLLMEngine, gate: Gate) -> None:
    seen: list[Any] = []

    async def consume() -> None:
        async for output in engine.generate(PROMPTS[0], LONG, "left"):
            seen.append(output)

    task = asyncio.create_task(consume())
    while not seen:
        await asyncio.sleep(0)
    task.cancel()
    num_seen = len(seen)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(seen) == num_seen


async def time_out(engine: AsyncLLMEngine, gate: Gate) -> None:
    stream = engine.generate(PROMPTS[0], LONG, "left")
    await anext(stream)
    gate.shut()
    await gate.reached()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    gate.open()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def close_under_a_reader(engine: AsyncLLMEngine, gate: Gate) -> None:
    stream = engine.generate(PROMPTS[0], LONG, "left")
    await anext(stream)
    gate.shut()
    await gate.reached()
    reader = asyncio.create_task(anext(stream, "nothing"))
    await asyncio.sleep(0)
    await stream.aclose()
    assert await reader == "nothing"
    gate.open()


@pytest.mark.parametrize(
    "leave", [break_off, close, drop_a_cycle, cancel, time_out, close_under_a_reader]
)
async def test_who_leaves_is_aborted_at_once_and_disturbs_nobody(
    engine, expected, leave, monkeypatch
):
    aborted, abort, gate = [], engine._engine.abort, Gate(engine, monkeypatch)
    monkeypatch.setattr(engine._engine, "abort", lambda x: aborted.append(x) or abort(x))
    gate.pace = asyncio.get_running_loop()
    other = asyncio.create_task(last(engine.generate(PROMPTS[1], LONG, "other")))
    await leave(engine, gate)
    # Its id is free for whoever comes next.
    again = await last(engine.generate(PROMPTS[0], GREEDY, "left"))
    assert aborted == ["left"]
    assert tokens(again) == expected(PROMPTS[0])
    assert tokens(await other) == expected(PROMPTS[1], LONG)
    await idle(engine)


async def test_a_slow_reader_costs_one_output_and_delays_nobody(engine, expected, monkeypatch):
    gate = Gate(engine, monkeypatch)
    made, output = [], LiveRequest.output

    def counted(live: LiveRequest, delta: bool = False) -> RequestOutput:
        made.append(live.request.request_id)
        return output(live, delta)

    monkeypatch.setattr(LiveRequest, "output", counted)
    gate.pace = asyncio.get_running_loop()
    slow = engine.generate(PROMPTS[0], LONG, "slow")
    first = await anext(slow)
    others = [engine.generate(p, LONG, str(i)) for i, p in enumerate(PROMPTS[1:5])]
    for index, other in enumerate(await asyncio.gather(*map(last, others))):
        assert tokens(other) == expected(PROMPTS[1 + index], LONG)
    while engine.num_unfinished:
        await asyncio.sleep(0.001)
    rest = [each async for each in slow]
    assert len(rest) == 1, "outputs piled up"
    assert tokens(rest[0]) == expected(PROMPTS[0], LONG)
    assert len(first.outputs[0].token_ids) < LONG.max_tokens
    assert made.count("slow") == 2, "outputs were made that nobody wanted"
    await idle(engine)


# ---- abort -------------------------------------------------------------------------------------


async def test_an_abort_gives_a_last_output_wherever_the_request_is(engine_of, monkeypatch):
    engine = engine_of(max_num_requests=2, max_num_seqs=1)
    gate, (entered, go) = Gate(engine, monkeypatch), hold_tokeniser(monkeypatch, "tokenising")
    params = SamplingParams(n=1, temperature=0, max_tokens=40, ignore_eos=True)
    names = ["running", "queued", "outside", "tokenising"]
    prompts: list[Any] = [PROMPTS[0], PROMPTS[1], "text", "long"]
    streams = {n: engine.generate(p, params, n) for n, p in zip(names, prompts, strict=True)}
    gate.pace = asyncio.get_running_loop()
    await anext(streams["running"])
    gate.shut()
    rest = {name: asyncio.create_task(last(stream)) for name, stream in streams.items()}
    assert await asyncio.to_thread(entered.wait, LIMIT)
    gate.open()
    await engine.abort(n for n in ["unknown", *names, *names])
    outputs = [await rest[name] for name in names]
    code = engine._engine.encode("text")
    for name, prompt, output in zip(names, prompts, outputs, strict=True):
        assert (output.request_id, output.finished) == (name, True)
        assert reasons(output) == {"abort"}
        assert output.prompt == (prompt if isinstance(prompt, str) else None)
        ids = [] if name == "tokenising" else prompt
        assert output.prompt_token_ids == (code if ids == "text" else ids)
        assert bool(output.outputs[0].token_ids) == (name == "running")
    go.set()
    await engine.abort("running")
    await idle(engine)


# ---- one bad request harms no other -------------------------------------------------------------

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "empty text": ({"prompt": ""}, "prompt is empty"),
    "empty ids": ({"prompt": []}, "prompt is empty"),
    "several": ({"prompt": ["a", "b"]}, "generate takes one prompt, not 2"),
    "no prompt": ({"prompt": None}, "A prompt is a NoneType; it must be a string, a list of"),
    "a wrong id": ({"prompt": [1, 10**6]}, "token id 1000000"),
    "too long": ({"prompt": [7] * 64}, "maximum context length is 64"),
    "a dict": ({"prompt": {"text": "a"}}, "A prompt dict has"),
    "a surrogate": ({"prompt": "\ud800"}, "surrogate"),
    "parameters": ({"sampling_params": {"n": 1}}, r"is a dict; it must be a SamplingParams\.$"),
    "an id that is none": ({"request_id": 5}, "request_id is 5; it must be a non-empty string"),
    "an empty id": ({"request_id": ""}, "request_id is ''"),
    "a priority": (
        {"priority": 3},
        "priority=3 has no effect with scheduling_policy='fcfs'; make the engine",
    ),
    "a used id": ({"request_id": "good"}, "already an unfinished request with the id 'good'"),
    "a far token": ({"sampling_params": SamplingParams(allowed_token_ids=[10**6])}, "1000000"),
}


@pytest.fixture(scope="module")
def lasting(folder: Path) -> Iterator[AsyncLLMEngine]:
    """One engine for all bad requests."""
    engine = make_async(folder)
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_request_fails_alone(lasting, expected, monkeypatch, bad, long):
    engine, (arguments, message) = lasting, BAD[bad]
    monkeypatch.setattr(async_engine, "is_long", lambda text, ids: long)
    good = engine.generate(PROMPTS[0], LONG, "good")
    await anext(good)
    full = {"prompt": PROMPTS[1], "sampling_params": GREEDY, "request_id": "bad"} | arguments
    stream = engine.generate(**full)
    later = engine.generate(PROMPTS[2], GREEDY, "later")
    with pytest.raises(InvalidRequestError, match=message):
        await anext(stream)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    assert tokens(await last(later)) == expected(PROMPTS[2])
    assert tokens(await last(good)) == expected(PROMPTS[0], LONG)
    await idle(engine)


# ---- who waits outside ---------------------------------------------------------------------------


def watch_adds(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> tuple[list, list]:
    """Ids in the order in which the engine gets them, and how many it had then."""
    order, held, add = [], [], engine._engine.add

    def watched(request: Any) -> Any:
        order.append(request.request_id)
        live = add(request)
        held.append(len(engine._engine._live))
        return live

    monkeypatch.setattr(engine._engine, "add", watched)
    return order, held


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
async def test_the_engine_holds_four_and_the_others_wait_in_order(
    engine_of, expected, monkeypatch, policy
):
    engine = engine_of(max_num_requests=4, scheduling_policy=policy)
    gate, (order, held) = Gate(engine, monkeypatch), watch_adds(engine, monkeypatch)
    urgency = [(7 * i) % 5 if policy == "priority" else 0 for i in range(len(PROMPTS))]
    gate.shut()
    tasks = [asyncio.create_task(last(engine.generate(p, GREEDY, str(i), urgency[i])))
             for i, p in enumerate(PROMPTS)]  # fmt: skip
    await gate.reached()
    assert engine.num_unfinished == len(PROMPTS)
    inside = list(order)
    tasks[9].cancel()
    gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[9], asyncio.CancelledError)
    outside = sorted(set(range(20)) - {9} - set(map(int, inside)), key=lambda i: urgency[i])
    assert order == inside + list(map(str, outside))
    assert len(inside) <= 4 == max(held)
    for prompt, result in zip(PROMPTS, results, strict=True):
        if not isinstance(result, asyncio.CancelledError):
            assert tokens(result) == expected(prompt)
    await idle(engine)


async def test_a_long_text_keeps_its_place(engine, monkeypatch):
    order, _ = watch_adds(engine, monkeypatch)
    _, go = hold_tokeniser(monkeypatch, "long")
    names = ["first", "long", "short", "last"]
    tasks = []
    for name in names:
        tasks.append(asyncio.create_task(last(engine.generate(name, GREEDY, name))))
        await asyncio.sleep(0)
    await tasks[0]
    assert order == ["first"]
    assert engine.num_unfinished == 3
    go.set()
    outputs = await asyncio.gather(*tasks)
    assert order == names
    assert outputs[1].metrics.queue_time >= 0
    assert all(output.metrics.ttft > 0 for output in outputs)


async def test_a_tokeniser_that_cannot_start_holds_up_nobody(engine, expected, monkeypatch):
    monkeypatch.setattr(async_engine, "is_long", lambda text, ids: text == "long")

    def refuse(*rest: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(engine._tokenisers, "submit", refuse)
    with pytest.raises(RuntimeError, match="new thread"):
        await last(engine.generate("long", GREEDY, "a"))
    output = await last(engine.generate(PROMPTS[0], GREEDY, "a"))
    assert tokens(output) == expected(PROMPTS[0])
    await idle(engine)


async def test_really_long_prompts_do_not_stop_the_event_loop(engine_of, monkeypatch):
    """They are made in another thread."""
    engine = engine_of(max_model_len=128)
    threads, make_request = {}, Engine.make_request

    def noted(self: Engine, request_id: str, *rest: Any) -> Any:
        threads[request_id] = threading.current_thread()
        return make_request(self, request_id, *rest)

    monkeypatch.setattr(Engine, "make_request", noted)
    prompts: dict[str, Any] = {"text": "a" * 5000, "ids": [7] * 20_000, "short": "a"}
    streams = [engine.generate(p, GREEDY, name) for name, p in prompts.items()]
    results = await asyncio.gather(*map(last, streams), return_exceptions=True)
    for result, length in zip(results, (5000, 20_000), strict=False):
        assert isinstance(result, InvalidRequestError)
        assert f"The prompt has {length} tokens" in str(result)
    assert threads["short"] is threading.current_thread()
    assert {threads["text"].name[:17], threads["ids"].name[:17]} == {"minillm-tokeniser"}
    await idle(engine)


# ---- drain ---------------------------------------------------------------------------------------


async def test_a_drain_waits_for_all_and_refuses_new_ones(engine_of, expected):
    engine = engine_of(max_num_requests=2)
    tasks = [
        asyncio.create_task(last(engine.generate(p, GREEDY, str(i))))
        for i, p in enumerate(PROMPTS[:6])
    ]
    await asyncio.sleep(0)
    drains = [asyncio.create_task(engine.drain()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(EngineDeadError, match="told to drain, so it takes no new requests"):
        await last(engine.generate(PROMPTS[0], GREEDY, "late"))
    assert await asyncio.gather(*drains) == [True, True]
    assert all(task.done() for task in tasks), "a drain returned before a last output"
    for prompt, task in zip(PROMPTS, tasks, strict=False):
        assert tokens(task.result()) == expected(prompt)
    assert await engine.drain(timeout=0.0) in (True, False)
    assert engine.is_running
    await engine.check_health()
    await idle(engine)


@pytest.mark.parametrize("timeout", [0, 0.01])
async def test_a_drain_aborts_the_rest_at_its_timeout(engine_of, monkeypatch, timeout):
    engine = engine_of(max_num_requests=2)
    gate = Gate(engine, monkeypatch)
    gate.shut()
    tasks = [
        asyncio.create_task(last(engine.generate(p, LONG, str(i))))
        for i, p in enumerate(PROMPTS[:6])
    ]
    await gate.reached()
    drain = asyncio.create_task(engine.drain(timeout))
    await asyncio.sleep(2 * timeout + 0.01)
    gate.open()
    assert await drain is False
    assert all("abort" in reasons(each) for each in await asyncio.gather(*tasks))
    await idle(engine)


async def test_a_drain_that_is_cancelled_harms_nobody(engine, expected, monkeypatch):
    gate = Gate(engine, monkeypatch)
    gate.shut()
    task = asyncio.create_task(last(engine.generate(PROMPTS[0], GREEDY, "a")))
    await gate.reached()
    drain = asyncio.create_task(engine.drain())
    await asyncio.sleep(0)
    drain.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drain
    gate.open()
    assert tokens(await task) == expected(PROMPTS[0])
    assert await engine.drain()


# ---- several event loops ------------------------------------------------------------------------


def test_two_event_loops_in_two_threads(engine, expected):
    async def serve(name: str, prompts: list) -> None:
        streams = [engine.generate(p, GREEDY, f"{name}{i}") for i, p in enumerate(prompts)]
        outputs = await asyncio.gather(*map(last, streams))
        assert list(map(tokens, outputs)) == list(map(expected, prompts))

    for prompt in PROMPTS:
        expected(prompt)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, serve("a", PROMPTS)), pool.submit(run, serve("b", PROMPTS[::-1]))]
        for job in jobs:
            job.result(LIMIT)
    run(idle(engine))


@pytest.mark.parametrize("reads", [False, True])
def test_the_requests_of_a_closed_event_loop_are_aborted(engine_of, expected, monkeypatch, reads):
    engine = engine_of(max_num_requests=3, max_model_len=120)
    gate = Gate(engine, monkeypatch)
    endless = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    loop = asyncio.new_event_loop()
    streams = [engine.generate(PROMPTS[i], endless, f"lost{i}") for i in range(6)]
    for stream in streams[:3]:
        loop.run_until_complete(asyncio.wait_for(anext(stream), LIMIT))
    gate.shut()
    pending = [loop.create_task(anext(each)) for each in streams] if reads else []
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    aborted, abort = set(), engine._engine.abort
    monkeypatch.setattr(engine._engine, "abort", lambda x: aborted.add(x) or abort(x))

    async def main() -> None:
        other = asyncio.create_task(last(engine.generate(PROMPTS[1], GREEDY, "other")))
        await asyncio.sleep(0)
        gate.open()
        assert tokens(await other) == expected(PROMPTS[1])
        await idle(engine)
        assert aborted >= {"lost0", "lost1", "lost2"}

    run(main())
    for task in pending:
        task._log_destroy_pending = False  # asyncio would say what this test is about


# ---- the end -------------------------------------------------------------------------------------


async def test_after_a_shutdown_everything_says_so(folder, monkeypatch):
    engine = make_async(folder, max_num_requests=1)
    gate = Gate(engine, monkeypatch)

    def open_later() -> None:
        """No step is done before the engine is told to stop."""
        while not engine._steps._stopping:
            time.sleep(0.001)
        gate.open()

    gate.shut()
    streams = [engine.generate(PROMPTS[i], LONG, str(i)) for i in range(3)]
    tasks = [asyncio.create_task(last(stream)) for stream in streams]
    drain = asyncio.create_task(engine.drain())
    await gate.reached()
    assert engine.is_running
    assert engine.dead_error is None
    threading.Thread(target=open_later).start()
    engine.shutdown()
    engine.shutdown()
    assert (engine.is_running, engine.errored) == (False, False)
    results = await asyncio.gather(*tasks, drain, return_exceptions=True)
    for use in (
        lambda: last(engine.generate(PROMPTS[0], GREEDY, "x")),
        lambda: engine.abort("x"),
        lambda: engine.drain(),
        lambda: engine.check_health(),
        lambda: engine.reset_prefix_cache(),
    ):
        results += await asyncio.gather(use(), return_exceptions=True)
    for result in [*results, engine.dead_error]:
        assert isinstance(result, EngineDeadError)
        assert str(result) == "This engine was shut down; make a new one."
    assert engine.num_unfinished == 0
    with pytest.raises(EngineDeadError):
        engine._engine.runner  # noqa: B018  (the memory was given back)


async def test_the_end_of_a_block_shuts_it_down(folder):
    async with make_async(folder) as engine:
        await last(engine.generate(PROMPTS[0], GREEDY, "a"))
    assert not engine.is_running


def test_an_engine_that_nobody_refers_to_ends_its_threads(folder, monkeypatch):
    monkeypatch.setattr(async_engine, "is_long", lambda text, ids: True)
    engine = make_async(folder)
    run(last(engine.generate(PROMPTS[0], GREEDY, "a")))
    thread, gone = engine._steps._thread, weakref.ref(engine)
    tokenisers = list(engine._tokenisers._threads)
    del engine
    gc.collect()
    assert gone() is None
    for each in (thread, *tokenisers):
        each.join(LIMIT)
        assert not each.is_alive()


async def test_a_stream_keeps_its_engine(folder, expected):
    stream = make_async(folder).generate(PROMPTS[0], GREEDY, "a")
    gc.collect()
    assert tokens(await last(stream)) == expected(PROMPTS[0])


@pytest.mark.skipif(
    not hasattr(time, "pthread_getcpuclockid"), reason="the system tells no time of a thread"
)
async def test_idle_costs_no_time(engine):
    """The thread's own clock stands still."""
    await last(engine.generate(PROMPTS[0], GREEDY, "a"))
    await idle(engine)
    clock = time.pthread_getcpuclockid(engine._steps._thread.ident)
    before = time.clock_gettime(clock)
    await asyncio.sleep(0.3)
    assert time.clock_gettime(clock) - before < 0.01


EXITS = {
    "finished": "asyncio.run(read(engine, 3))",
    "left": "asyncio.run(leave(engine))",
    "running": "loop = asyncio.new_event_loop(); loop.run_until_complete(leave(engine))",
    "tasks": (
        "loop = asyncio.new_event_loop()\n"
        "tasks = [loop.create_task(read(engine, 3))]\n"
        "loop.run_until_complete(asyncio.sleep(0.05))\n"
        "tasks[0]._log_destroy_pending = False"
    ),
}
SCRIPT = """
import asyncio, sys
from minillm import AsyncEngineArgs, AsyncLLMEngine, SamplingParams
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
args = AsyncEngineArgs(sys.argv[1], num_gpu_blocks_override=64, dtype="float32")
engine = AsyncLLMEngine.from_engine_args(args)
kept = []
async def one(engine, i):
    async for output in engine.generate([5, 6, 7 + i], LONG, str(i)):
        pass
async def read(engine, count):
    await asyncio.gather(*(one(engine, i) for i in range(count)))
async def leave(engine):
    for i in range(3):
        kept.append(engine.generate([5, 6, 7 + i], LONG, str(i)))
        await anext(kept[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", EXITS)
def test_the_interpreter_ends_without_a_shutdown(folder, how):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT + EXITS[how], str(folder)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- arguments ----------------------------------------------------------------------------------


def test_arguments_are_those_of_an_engine_and_one_more(folder):
    args = AsyncEngineArgs(folder, max_num_requests=4, seed=3)
    assert (args.max_num_requests, args.seed, args.gpu_memory_utilization) == (4, 3, 0.9)
    assert AsyncEngineArgs(model=folder).max_num_requests == 1024
    with pytest.raises(UnknownArgumentError, match=r"AsyncEngineArgs has no .* 'max_num_requests'"):
        AsyncEngineArgs(folder, max_num_request=4)
    for wrong in (0, -1, 1.5, True, "4", None):
        with pytest.raises(ConfigError, match="max_num_requests is"):
            AsyncEngineArgs(folder, max_num_requests=wrong)
    with pytest.raises(ConfigError, match="block_size is 0"):
        AsyncEngineArgs(folder, block_size=0)
    with pytest.raises(ConfigError, match="takes AsyncEngineArgs, not EngineArgs"):
        AsyncLLMEngine.from_engine_args(EngineArgs(folder))


@pytest.mark.parametrize(
    "name", ["use_v2_block_manager", "disable_log_requests", "enable_log_requests"]
)
def test_arguments_without_a_meaning_warn(folder, name):
    with pytest.warns(UserWarning, match=f"{name} has no meaning") as caught:
        AsyncEngineArgs(folder, **{name: True})
    assert caught[0].filename == __file__
    with pytest.raises(UnsupportedFeatureError, match=f"{name}='x' is not supported: it may be"):
        AsyncEngineArgs(folder, **{name: "x"})


async def test_small_calls(engine):
    assert (await engine.get_tokenizer()).eos_token_id == EOS
    long = [7] * 20
    await last(engine.generate(long, GREEDY, "a"))
    assert (await last(engine.generate(long, GREEDY, "b"))).num_cached_tokens
    assert await engine.reset_prefix_cache() is True
    assert not (await last(engine.generate(long, GREEDY, "c"))).num_cached_tokens
    with pytest.raises(ZeroDivisionError):
        await in_thread(engine, lambda: 1 / 0)
    await engine.check_health()
