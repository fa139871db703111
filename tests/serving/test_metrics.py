"""GET /metrics: names, labels, and values that agree with a log of the requests."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from minillm import AsyncLLMEngine, SamplingParams
from minillm.serving.app import build_app
from minillm.serving.metrics import HISTOGRAMS, Histogram, RequestObserver
from minillm.serving.settings import Settings
from tests.serving.asgi_calls import Reply, call

MARK = 7  # the token whose logits are made NaN
NAMES = """
gauge num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
gauge cache_config_info
counter prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_cached
counter generation_tokens request_success admission_rejections corrupted_requests
counter requests_without_first_token
histogram time_to_first_token_seconds inter_token_latency_seconds
histogram request_time_per_output_token_seconds e2e_request_latency_seconds
histogram request_queue_time_seconds request_inference_time_seconds request_prefill_time_seconds
histogram request_decode_time_seconds request_prompt_tokens request_generation_tokens
histogram request_params_n request_params_max_tokens iteration_tokens_total
histogram request_num_preemptions request_prefill_kv_computed_tokens
"""


async def scrape(app: Any, accept: str = "") -> dict[tuple[str, ...], float]:
    """All samples by name and by the values of the labels but model_name and engine."""
    reply = await call(app, "/metrics", headers={"accept": accept})
    assert reply.status == 200
    found = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            if sample.name.startswith("vllm:") and "config_info" not in sample.name:
                assert sample.labels["model_name"] == "m"
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name.removeprefix("vllm:"), *labels.values()] = sample.value
    return found


async def complete(
    app: Any,
    prompt: Any,
    leave_after: int | None = None,
    on_part: Callable[[], object] = lambda: None,
    **more: Any,
) -> Reply:
    """One completion; 12 tokens if not said otherwise."""
    body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0} | more
    return await call(app, "/v1/completions", body, leave_after=leave_after, on_part=on_part)


# ---- names -------------------------------------------------------------------------------------


async def test_names_and_types_are_those_of_vllm(engine):
    reply = await call(build_app(engine, Settings(("m",))), "/metrics")
    families = {each.name: each.type for each in text_string_to_metric_families(reply.text)}
    for line in NAMES.strip().splitlines():
        kind, *names = line.split()
        for name in names:
            assert families[f"vllm:{name}"] == kind, name
    assert "process_resident_memory_bytes" in families
    # vllm bench serve takes these for a server that speculates.
    assert not any("spec_decode" in name for name in families)


async def test_speculation_has_the_lines_that_vllm_bench_serve_reads(engine_of):
    engine = engine_of(speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    app = build_app(engine, Settings(("m",)))
    await complete(app, "a b c d e f", max_tokens=40)
    lines = (await call(app, "/metrics")).text.splitlines()
    found = [line.partition("{")[0] for line in lines if line.startswith("vllm:spec_decode")]
    ends = ["drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos",
            "accepted_tokens_per_pos"]  # fmt: skip
    assert found == [f"vllm:spec_decode_num_{end}_total" for end in ends]
    places = [line for line in lines if "per_pos_total{" in line]
    assert [f'position="{i}"' in line for i, line in enumerate(places)] == [True, True]


async def test_a_prometheus_that_prefers_openmetrics_gets_names_with_colons(engine):
    app = build_app(engine, Settings(("m",)))
    found = await scrape(app, "application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert ("num_requests_running",) in found


async def test_two_applications_in_a_process_count_apart(engine_of):
    apps = [build_app(engine_of(), Settings(("m",))) for _ in range(2)]
    await complete(apps[0], "abc")
    found = [await scrape(app) for app in apps]
    assert [each["request_success_total", "length"] for each in found] == [1, 0]
    assert [each[("iteration_tokens_total_count",)] for each in found] == [12, 0]


# ---- values ------------------------------------------------------------------------------------


class Log:
    """What the clients saw."""

    def __init__(self) -> None:
        self.ends: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.num_prompt = self.num_new = self.num_cached = 0

    def add(self, reply: Reply, aborted: int = 0) -> None:
        """Count a reply; `aborted` completions of it were left by the client."""
        self.statuses[str(reply.status)] += 1
        if reply.status != 200:
            return
        events = reply.events() or [reply.json()]
        for event in events:
            for choice in event.get("choices", ()):
                if choice["finish_reason"] is not None:
                    self.ends[choice["finish_reason"]] += 1
        self.ends["abort"] += aborted
        usage = events[-1].get("usage")
        if usage:
            self.num_prompt += usage["prompt_tokens"]
            self.num_new += usage["completion_tokens"]
            self.num_cached += usage["prompt_tokens_details"]["cached_tokens"]


def spoil(engine: AsyncLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden states of the token MARK become NaN."""
    layer = engine._engine.runner.model.layers[0]
    works = layer.forward

    def forward(x: Any, residual: Any, rope: Any, batch: Any, kv: Any) -> Any:
        x, residual = works(x, residual, rope, batch, kv)
        return torch.where((batch.input_ids == MARK)[:, None], math.nan, x), residual

    monkeypatch.setattr(layer, "forward", forward)


async def mixed_load(app: Any, log: Log) -> None:
    """Requests of every kind, some at the same time; the engine has 18 blocks of 4 tokens."""
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    stream = ["a b c d e f", "g h i j"]
    log.add(await complete(app, stream[0]))
    log.add(await complete(app, stream[0] + " x", **usage))  # with a prefix hit
    log.add(await complete(app, stream, n=2, seed=1, temperature=1))
    log.add(await complete(app, [stream[1], "k l"], **usage))
    log.add(await complete(app, "long enough", max_tokens=5, stop_token_ids=list(range(264))))
    # Preemptions: three sequences of 11 + 30 tokens do not fit into 72 positions.
    texts = ["p q r s t u", "v w x y z .", "0 1 2 3 4 5"]
    jobs = [complete(app, each, max_tokens=30, **usage) for each in texts]
    for reply in await asyncio.gather(*jobs):
        log.add(reply)
    log.add(await complete(app, [MARK, 8, 9]))  # 500: logits are NaN
    log.add(await complete(app, [8, MARK, 9], **usage))
    log.add(await complete(app, "too long" * 20))  # 400
    log.add(await complete(app, ["x"] * 7))  # 400: the server never has room for 7 sequences
    hot = {"n": 2, "temperature": 1}
    reply = await complete(app, "some text", max_tokens=40, leave_after=1, **usage, **hot)
    log.add(reply, aborted=2)
    hold = [complete(app, each, max_tokens=30) for each in ("a", "b", "c", "d", "e", "f")]
    for reply in await asyncio.gather(*hold, complete(app, "g"), complete(app, "h", **hot)):
        log.add(reply)


async def test_every_counter_agrees_with_the_log_of_a_mixed_load(engine_of, monkeypatch):
    engine = engine_of(
        num_gpu_blocks_override=18, max_num_seqs=4,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )  # fmt: skip
    spoil(engine, monkeypatch)
    app, log = build_app(engine, Settings(("m",), max_waiting=2)), Log()
    await mixed_load(app, log)
    found = await scrape(app)
    summaries, records = engine.trace.requests(), list(engine.trace)
    check_ends(found, log)
    check_tokens(found, log, summaries, records)
    check_histograms(found, log, summaries, records)


def check_ends(found: dict[tuple[str, ...], float], log: Log) -> None:
    assert log.statuses == {"200": 15, "400": 2, "500": 2, "503": 2}
    for reason in ("length", "stop", "abort"):
        assert log.ends[reason] > 0
        assert found["request_success_total", reason] == log.ends[reason], reason
    assert found["request_success_total", "error"] == log.statuses["500"] == 2
    assert found[("corrupted_requests_total",)] == 2
    assert found["admission_rejections_total", "max_waiting"] == log.statuses["503"]
    for status, count in log.statuses.items():
        assert found["http_requests_total", "/v1/completions", "POST", status] == count


def check_tokens(
    found: dict[tuple[str, ...], float], log: Log, summaries: list[Any], records: list[Any]
) -> None:
    total = {key[0]: value for key, value in found.items() if len(key) == 1}
    assert total["prompt_tokens_total"] == sum(one.num_prompt_tokens for one in summaries)
    assert total["prefix_cache_queries_total"] == total["prompt_tokens_total"]
    cached = sum(one.num_cached_tokens for one in summaries)
    assert total["prefix_cache_hits_total"] == total["prompt_tokens_cached_total"] == cached
    assert cached >= log.num_cached > 0  # the log lacks requests that failed or were aborted
    assert total["prompt_tokens_total"] > log.num_prompt > 0
    new = sum(one.num_tokens for record in records for one in record.ended)
    assert total["generation_tokens_total"] == new > log.num_new > 0
    preempted = sum(len(record.preempted) for record in records)
    assert total["num_preemptions_total"] == preempted > 0
    drafted = [one for record in records for one in record.drafted if one.num_drafted]
    assert total["spec_decode_num_drafts_total"] == len(drafted) > 0
    assert total["spec_decode_num_draft_tokens_total"] == sum(one.num_drafted for one in drafted)
    accepted = sum(one.num_accepted for one in drafted)
    assert total["spec_decode_num_accepted_tokens_total"] == accepted > 0
    for place in range(3):
        count = sum(one.num_accepted > place for one in drafted)
        assert found["spec_decode_num_accepted_tokens_per_pos_total", str(place)] == count


def check_histograms(
    found: dict[tuple[str, ...], float], log: Log, summaries: list[Any], records: list[Any]
) -> None:
    total = {key[0]: value for key, value in found.items() if len(key) == 1}
    whole = [one for one in summaries if set(one.ends) <= {"stop", "length"}]
    begun = [one for one in summaries if one.ttft is not None]
    assert len(summaries) > len(begun) > len(whole) > 0
    tokenless = [found["requests_without_first_token_total", end] for end in ("abort", "error")]
    assert tokenless == [0, len(summaries) - len(begun)]  # every request is in one of the two
    for name, times, values in (
        ("time_to_first_token_seconds", begun, [one.ttft for one in begun]),
        ("request_queue_time_seconds", begun, [one.queue_time for one in begun]),
        ("e2e_request_latency_seconds", whole, [one.e2e for one in whole]),
        ("request_time_per_output_token_seconds", [one for one in whole if one.tpot is not None],
         [one.tpot for one in whole if one.tpot is not None]),
        ("request_prompt_tokens", whole, [one.num_prompt_tokens for one in whole]),
        ("request_num_preemptions", whole, [one.num_preemptions for one in whole]),
        ("request_params_n", whole, [len(one.num_tokens) for one in whole]),
        ("request_prefill_kv_computed_tokens", whole,
         [one.num_prompt_tokens - one.num_cached_tokens for one in whole]),
    ):  # fmt: skip
        assert total[f"{name}_count"] == len(times), name
        assert total[f"{name}_sum"] == pytest.approx(sum(values)), name
    assert total["request_generation_tokens_count"] == sum(len(one.num_tokens) for one in whole)
    assert total["request_generation_tokens_sum"] == sum(sum(one.num_tokens) for one in whole)
    assert total["request_generation_tokens_sum"] == log.num_new
    computed = sum(one.num_prefill_tokens + one.num_decode_tokens for one in records)
    assert total["iteration_tokens_total_sum"] == computed
    assert total["iteration_tokens_total_count"] == len(records)
    gaps = total["inter_token_latency_seconds_count"]
    assert 0 < gaps <= total["generation_tokens_total"] - len(begun)
    for name in HISTOGRAMS:
        assert found[f"{name}_bucket", "+Inf"] == total[f"{name}_count"]


async def test_gauges_show_who_runs_and_who_waits_and_why(engine_of):
    engine = engine_of(max_num_seqs=2)
    app = build_app(engine, Settings(("m",)))
    jobs = [complete(app, f"{i}", max_tokens=60, stream=True) for i in range(5)]
    tasks = [asyncio.ensure_future(each) for each in jobs]
    seen: dict[tuple[str, ...], float] = {}
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.002)
        now = await scrape(app)
        if now[("num_requests_waiting",)] >= 3 and now[("num_requests_running",)] == 2:
            seen = now
            if now["num_requests_waiting_by_reason", "batch_slots"]:
                break
    assert seen["num_requests_waiting_by_reason", "batch_slots"] == 3
    assert seen["num_requests_waiting_by_reason", "blocks"] == 0
    assert 0 < seen[("kv_cache_usage_perc",)] < 1
    await asyncio.gather(*tasks)
    now = await scrape(app)
    assert now[("num_requests_running",)] == now[("num_requests_waiting",)] == 0


async def test_counters_never_decrease(engine, monkeypatch):
    app = build_app(engine, Settings(("m",)))
    await complete(app, "abc")
    before = await scrape(app)
    engine._engine.scheduler.counters.num_prompt_tokens -= 2
    after = await scrape(app)
    key = ("prompt_tokens_total",)
    assert after[key] == before[key] == 3


# ---- parts -------------------------------------------------------------------------------------


def test_a_histogram_counts_values_at_a_bound_below_it():
    found = Histogram((1, 2))
    for value, count in ((0.5, 1), (1, 2), (1.5, 4), (2, 8), (3, 16)):
        found.observe(value, count)
    assert found.buckets() == [("1.0", 3), ("2.0", 15), ("+Inf", 31)]
    assert found.total == 0.5 + 2 + 6 + 16 + 48


def test_gaps_of_several_tokens_are_shared(engine, monkeypatch):
    metrics = build_app(engine, Settings(("m",))).state.server.metrics
    observer, now = RequestObserver(metrics, SamplingParams(n=2)), [10.0]
    monkeypatch.setattr("minillm.serving.metrics.perf_counter", lambda: now[0])
    for at, choice, count in ((10, 0, 3), (10.1, 1, 1), (11, 0, 4), (11.1, 1, 1), (12, 0, 0)):
        now[0] = at
        observer.tokens(choice, count)
    gaps = metrics.histograms["inter_token_latency_seconds"]
    assert sum(gaps.counts) == 5  # four of 0.25 s, one of 1 s
    assert gaps.total == pytest.approx(2.0)
    counts = dict(zip([*gaps.bounds, math.inf], gaps.counts, strict=True))
    assert (counts[0.3], counts[1.0]) == (4, 1)


# ---- ends that have no output ------------------------------------------------------------------


async def test_a_client_that_leaves_before_the_reply_is_an_abort(engine):
    app = build_app(engine, Settings(("m",)))
    body = {"prompt": "a", "max_tokens": 60, "n": 2, "temperature": 1, "ignore_eos": True}
    task = asyncio.ensure_future(call(app, "/v1/completions", body))
    while len(engine.trace) < 3:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found = await scrape(app)
    assert found["request_success_total", "abort"] == 2
    assert found["requests_without_first_token_total", "abort"] == 1
    assert found[("time_to_first_token_seconds_count",)] == 0
    assert found[("e2e_request_latency_seconds_count",)] == 0


async def test_a_stream_that_fails_after_its_first_token_has_its_time(engine, monkeypatch):
    """The requests of the histogram and those of the counter are all requests."""
    app, step = build_app(engine, Settings(("m",))), engine._engine.step
    arrived = Event()

    def broken() -> list[Any]:
        if len(engine.trace) > 3:
            arrived.wait(60)  # else the failure may overtake the first token
            raise SystemExit
        return step()

    monkeypatch.setattr(engine._engine, "step", broken)
    events = (await complete(app, "a", stream=True, on_part=arrived.set)).events()
    assert "error" in events[-1]
    assert len(events) > 1
    found = await scrape(app)
    assert found[("time_to_first_token_seconds_count",)] == 1
    assert found["requests_without_first_token_total", "error"] == 0
    assert found["request_success_total", "error"] == 1


async def test_requests_of_a_dead_engine_are_errors_and_invalid_ones_no_ends(engine, monkeypatch):
    app = build_app(engine, Settings(("m",)))

    def broken() -> None:
        raise SystemExit

    reply = await complete(app, [5] * 20_000)  # checked in another thread, after its begin
    assert reply.status == 400
    found = await scrape(app)
    assert not any(found["request_success_total", each] for each in ("abort", "error"))
    monkeypatch.setattr(engine._engine, "step", broken)
    reply = await complete(app, "a", n=2, temperature=1)
    assert reply.status == 503
    found = await scrape(app)
    assert found["request_success_total", "error"] == 2
    assert found["request_success_total", "abort"] == 0
    assert found["requests_without_first_token_total", "error"] == 1
    assert found["http_requests_total", "/v1/completions", "POST", "503"] == 1
