"""GET /debug/requests/{id} and /debug/trace: what they say agrees with the replies."""

import asyncio
import json
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from minillm import AsyncLLMEngine
from minillm.serving.app import build_app
from minillm.serving.request_trace import names_of
from minillm.serving.settings import Settings
from minillm.trace.recorder import Trace
from tests.serving.asgi_calls import Reply, call
from tests.serving.async_small import LIMIT, Gate

ON = Settings(("m",), request_trace=True)
TOKENS = 20


@pytest.fixture
def engine(engine_of: Callable[..., AsyncLLMEngine]) -> AsyncLLMEngine:
    """Room for two sequences of 30 tokens, but not until their end."""
    return engine_of(num_gpu_blocks_override=16, max_num_seqs=3)


async def complete(app: Any, name: str, prompt: str = "", **more: Any) -> Reply:
    """A completion of `TOKENS` tokens with this request id."""
    body = {"prompt": prompt or f"{name} a b c", "max_tokens": TOKENS, "ignore_eos": True}
    body |= {"request_id": name, "temperature": 1, "seed": 3}
    return await call(app, "/v1/completions", body | more)


async def told(app: Any, name: str) -> dict[str, Any]:
    """The history of a request."""
    reply = await call(app, f"/debug/requests/cmpl-{name}")
    assert reply.status == 200, reply.text
    return reply.json()


def runs(body: dict[str, Any], completion: int = 0) -> list[tuple[str, int, str | None]]:
    """Kind, steps and reason of the events of a completion."""
    return [
        (each["kind"], each["steps"], each["reason"])
        for each in body["events"]
        if each["completion"] == completion
    ]


async def crowd(app: Any, engine: AsyncLLMEngine) -> list[Reply]:
    """Three requests of 8 + 20 tokens, the first with two completions, for 64 positions. The thread
    is held until all have entered, so that they begin in the same step."""
    inbox, end = engine._steps._inbox, time.monotonic() + LIMIT

    def hold() -> None:
        while inbox.qsize() < 3 and time.monotonic() < end:
            time.sleep(1e-3)

    held = engine._steps.call(hold)
    jobs = [complete(app, f"r{i}", n=2 if i == 0 else 1) for i in range(3)]
    replies = await asyncio.gather(*jobs)
    held.result()
    return replies


# ---- requests ----------------------------------------------------------------------------------


async def test_a_crowd_is_explained_with_the_numbers(engine):
    app = build_app(engine, ON)
    await crowd(app, engine)
    first, second, third = [await told(app, f"r{i}") for i in range(3)]
    assert [one["state"] for one in (first, second, third)] == ["finished"] * 3
    for completion, begin in ((0, [("prefill", 1, None)]), (1, [])):
        end = [("decode", 19, None), ("finished", 1, "length")]
        assert runs(first, completion) == begin + end
    kinds = [kind for kind, _, _ in runs(second)]
    assert kinds == ["prefill", "decode", "preempted", "preempted", "prefill", "decode", "finished"]
    why = runs(second)[2][2], runs(second)[3][2]
    assert why == ("its blocks went to cmpl-r0~0", "no blocks: needs 7, has 4")
    again = runs(second)[4][2]
    assert again is not None
    assert again.endswith(" of its tokens were computed before a preemption")
    assert runs(third)[:2] == [
        ("waiting", 17, "no batch slots: needs 1, has 0"),
        ("waiting", 3, "behind cmpl-r1~1, which has no blocks: needs 7, has 4"),
    ]
    assert [kind for kind, _, _ in runs(third)[2:]] == ["prefill", "decode", "finished"]


async def test_the_history_agrees_with_the_reply_and_the_steps(engine):
    app = build_app(engine, ON)
    for name, reply in zip(("r0", "r1", "r2"), await crowd(app, engine), strict=True):
        body, usage = await told(app, name), reply.json()["usage"]
        events = body["events"]
        ends = [one["tokens"] for one in events if one["kind"] == "finished"]
        assert sum(ends) == usage["completion_tokens"]
        assert body["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        waited = float(reply.headers["x-minillm-queue-time-ms"]) / 1000
        assert body["queue_time"] == pytest.approx(waited, abs=1e-5)
        prefills = [one["tokens"] for one in events if one["kind"] == "prefill"]
        decoded = sum(one["tokens"] for one in events if one["kind"] == "decode")
        forks = len(ends) - 1
        assert decoded + len(prefills) + forks == sum(ends)
        assert prefills[0] == usage["prompt_tokens"]
        assert sum(body["prefix"].values()) == usage["prompt_tokens"]
        for completion in range(len(ends)):
            own = [one for one in events if one["completion"] == completion]
            for before, after in pairwise(own[:-1]):  # no step is missing, none is twice
                assert after["step"] == before["step"] + before["steps"]
                assert after["time"] > before["time"]
            assert own[-1]["step"] == own[-2]["step"] + own[-2]["steps"] - 1


async def test_a_prefix_hit_is_reported_while_it_runs_and_afterwards(engine_of, monkeypatch):
    engine = engine_of()
    app, gate = build_app(engine, ON), Gate(engine, monkeypatch)
    await complete(app, "one", "the same prompt 1")
    gate.pace = asyncio.get_running_loop()
    job = asyncio.ensure_future(complete(app, "two", "the same prompt 2"))
    while not any("two" in names_of(one.request_id)
                  for record in engine.trace for one in record.added):  # fmt: skip
        await asyncio.sleep(0)
    gate.shut()
    await gate.reached()
    body = await told(app, "two")
    assert (body["state"], body["cached_tokens"]) == ("running", 16)
    assert body["prefix"]["cached"] == 16
    gate.open()
    await job
    after = await told(app, "two")
    assert (after["state"], after["prefix"]) == ("finished", body["prefix"])


async def test_a_request_that_no_step_knows_is_waiting(engine, monkeypatch):
    app, gate = build_app(engine, ON), Gate(engine, monkeypatch)
    gate.shut()
    job = asyncio.ensure_future(complete(app, "a"))
    await gate.reached()
    found = await told(app, "a")
    assert runs(found) == [("waiting", 1, "no step was planned since it arrived")]
    assert (found["state"], found["cached_tokens"]) == ("waiting", None)
    later = await told(app, "a")
    assert later["queue_time"] > found["queue_time"] > 0
    gate.open()
    await job
    assert (await told(app, "a"))["state"] == "finished"


async def test_a_waiting_request_outside_says_how_many_the_engine_has(engine_of, monkeypatch):
    engine = engine_of(max_num_requests=2)
    app, gate = build_app(engine, ON), Gate(engine, monkeypatch)
    jobs = [asyncio.ensure_future(complete(app, name, max_tokens=50)) for name in "abc"]
    while len(engine.trace) < 3:
        await asyncio.sleep(0)
    gate.shut()
    await gate.reached()
    why = "the engine has its 2 requests (max_num_requests)"
    assert runs(await told(app, "c")) == [("waiting", 1, why)]
    gate.open()
    await asyncio.gather(*jobs)


async def test_a_request_older_than_the_records_is_told_from_there(engine):
    app = build_app(engine, ON)
    job = asyncio.ensure_future(complete(app, "old", max_tokens=40))
    while len(engine.trace) < 10:
        await asyncio.sleep(0)
    engine.trace.clear()
    await job
    body = await told(app, "old")
    assert [kind for kind, _, _ in runs(body)] == ["decode", "finished"]
    assert body["events"][-1]["tokens"] == 40
    assert body["queue_time"] > 0


# ---- access ------------------------------------------------------------------------------------


async def test_both_routes_are_off_by_default(engine):
    for path in ("/debug/requests/cmpl-x", "/debug/trace"):
        reply = await call(build_app(engine, Settings(("m",))), path)
        assert reply.status == 404
        assert "start it with --enable-request-trace" in reply.json()["error"]["message"]


async def test_unknown_requests_and_wrong_numbers_are_one_sentence(engine):
    app = build_app(engine, ON)
    reply = await call(app, "/debug/requests/" + "x" * 5000)
    assert reply.status == 404
    assert len(reply.text) < 400
    for last in ("0", "-1", "x", "", "1" * 50, "١"):
        reply = await call(app, f"/debug/trace?last={last}")
        assert reply.status == 400, last
        assert "it must be from 1 to 100,000" in reply.json()["error"]["message"]


# ---- the trace ---------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [1, 7, 1000])
async def test_the_latest_steps_are_a_trace_file(engine, tmp_path, last):
    app = build_app(engine, ON)
    await crowd(app, engine)
    reply = await call(app, f"/debug/trace?last={last}")
    file = tmp_path / "live.jsonl"
    file.write_bytes(b"".join(reply.parts))
    trace = Trace.load(file)
    number = min(last, len(engine.trace))
    assert [one.step for one in trace] == [one.step for one in engine.trace[-number:]]
    assert trace.num_dropped == len(engine.trace) - number
    before, _ = trace.snapshot()
    whole, records = engine.trace.snapshot()
    for record in records[:-number]:
        whole.apply(record)
    assert before.sequences == whole.sequences


async def test_a_running_step_is_left_out_of_the_trace(engine, monkeypatch):
    app = build_app(engine, ON)
    await complete(app, "a")
    engine.trace[-1].computed = 0.0
    reply = await call(app, "/debug/trace?last=5")
    steps = [line["step"] for line in map(json.loads, reply.text.splitlines()[1:])]
    assert steps == [one.step for one in engine.trace[-6:-1]]
