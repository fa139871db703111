"""Requests are sent when they are due, whatever the server does."""

import math
from dataclasses import replace
from typing import Any

import pytest

from minillm.lab.benchmarks.serving.bench import Bench, Plan
from minillm.lab.benchmarks.serving.reply import COLUMNS
from minillm.lab.benchmarks.serving.slo import parse_slo
from minillm.lab.benchmarks.serving.summary import Evaluation
from minillm.lab.benchmarks.serving.sweep import sweep
from minillm.lab.benchmarks.serving.workload import Arrivals, parse_workload
from tests.serving.load_fake import FakeServer, bench_of
from tests.serving.virtual_time import run_virtual

CONSTANT = Arrivals(10.0, math.inf)
FIXED = parse_workload("fixed:input=5,output=2")
PLAN = Plan(FIXED, CONSTANT, (10.0,), 40)


def rows(run: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in run["rows"]]


def one_run(server: FakeServer, plan: Plan, load: float = 10.0, **options: Any) -> dict[str, Any]:
    """The run of one load."""

    async def main() -> dict[str, Any]:
        async with bench_of(server, plan, **options) as bench:
            return await bench.run(load, 0, "")

    found: dict[str, Any] = run_virtual(main())
    return found


def test_a_stalled_server_shows_as_latency() -> None:
    """Nothing is sent from 1 s to 3 s. All 20 requests that are due then still leave on time, and
    each waits for the end of the stall. A closed loop would show one slow request."""
    server = FakeServer(ttft=0.05, itl=0.0, stall=(1.0, 3.0))
    found = one_run(server, PLAN)
    due = [0.1 * place for place in range(40)]
    assert server.times == pytest.approx(due, abs=1e-6)
    ttft = [row["sent"] + row["frames_us"][0] / 1e6 - row["intended"] for row in rows(found)]
    expected = [3.0 - at if 1.0 <= at + 0.05 < 3.0 else 0.05 for at in due]
    assert ttft == pytest.approx(expected, abs=1e-5)
    assert sum(each > 0.1 for each in ttft) == 20
    assert found["summary"]["lateness"]["max"] == pytest.approx(0, abs=1e-6)

    closed = replace(PLAN, arrivals=None)
    slow = one_run(FakeServer(ttft=0.05, itl=0.0, stall=(1.0, 3.0)), closed, 1)
    latencies = [row["frames_us"][0] / 1e6 for row in rows(slow)]
    assert sum(each > 0.1 for each in latencies) == 1


def test_a_limit_of_concurrency_counts_as_latency() -> None:
    """Each request takes 0.4 s, and one leaves every 0.1 s; with two at once, the wait grows."""
    server = FakeServer(ttft=0.4, itl=0.0)
    found = one_run(server, replace(PLAN, concurrency=2, count=8))
    assert server.most == 2
    lateness = [row["sent"] - row["intended"] for row in rows(found)]
    assert lateness == pytest.approx([0, 0, 0.2, 0.2, 0.4, 0.4, 0.6, 0.6], abs=1e-5)
    first = rows(found)[-1]
    assert found["summary"]["latencies"]["ttft"]["max"] == pytest.approx(1.0, abs=1e-5)
    assert first["intended"] == pytest.approx(0.7, abs=1e-5)


def test_a_closed_loop_keeps_its_places_full() -> None:
    server = FakeServer(ttft=0.4, itl=0.1)
    found = one_run(server, replace(PLAN, arrivals=None, count=12), 3)
    assert server.most == 3
    assert found["summary"]["wall"] == pytest.approx(12 / 3 * 0.5, abs=1e-5)
    assert found["summary"]["peak_concurrency"] == 3


def test_rejections_and_failures_are_counted() -> None:
    """Requests take 0.35 s at 10/s. Of each 4, two are served, the third is refused because two
    are in flight, and the fourth breaks."""
    server = FakeServer(ttft=0.35, itl=0.0, refuse_above=2, break_if=lambda one: one % 4 == 3)
    plan = replace(PLAN, evaluation=Evaluation(parse_slo("ttft=400ms")))
    summary = one_run(server, plan)["summary"]
    assert (summary["ok"], summary["rejected"], summary["failed"]) == (20, 10, 10)
    assert summary["slo"]["attainment"] == pytest.approx(20 / 40)
    assert summary["errors"] == {"503: overloaded": 10, "500: broken on purpose": 10}


def test_turns_follow_replies_after_the_time_to_think() -> None:
    workload = parse_workload("chat:turns=3,system=4,input=4,input_sigma=0,output=2,output_sigma=0")
    server = FakeServer(ttft=0.5, itl=0.0)
    plan = Plan(workload, CONSTANT, (10.0,), 2)
    found = rows(one_run(server, plan, chat=True))
    assert [(row["index"], row["turn"]) for row in found] == [(0, 0), (0, 1), (0, 2), (1, 0),
                                                            (1, 1), (1, 2)]  # fmt: skip
    thinks = [turn.think for turn in workload.draw(2, 0)[0]]
    assert found[1]["intended"] == pytest.approx(found[0]["end"] + thinks[1], abs=1e-5)
    assert found[2]["intended"] == pytest.approx(found[1]["end"] + thinks[2], abs=1e-5)
    last = [body for body in server.seen if len(body["messages"]) == 5]
    assert len(last) == 2
    assert last[0]["messages"][1] == {"role": "assistant", "content": " w0 w1"}


def test_turns_after_a_failure_are_not_sent() -> None:
    workload = parse_workload("chat:turns=3,output=4")
    server = FakeServer(break_if=lambda number: number == 1)
    found = one_run(server, Plan(workload, CONSTANT, (10.0,), 1))
    assert [row["outcome"] for row in rows(found)] == ["ok", "failed"]


def test_repeats_have_own_arrivals_and_all_runs_own_prompts() -> None:
    async def main(server: FakeServer) -> tuple[list[Any], Bench]:
        plan = Plan(FIXED, Arrivals(1.0), (5.0, 10.0), 6, repeats=2)
        async with bench_of(server, plan) as bench:
            return await sweep(bench), bench

    server = FakeServer()
    points, bench = run_virtual(main(server))
    assert [one["load"] for one in points] == [5.0, 10.0]
    assert [(run["load"], run["seed"]) for run in bench.runs] == [
        (5.0, 0), (5.0, 1), (10.0, 0), (10.0, 1)
    ]  # fmt: skip
    due = [[row["intended"] for row in rows(run)] for run in bench.runs]
    assert due[0] != pytest.approx(due[1])
    assert due[0] == pytest.approx([2 * at for at in due[2]], abs=1e-5)
    prompts = {tuple(body["prompt"]) for body in server.seen}
    assert len(prompts) == 24
    spread = points[0]["ttft_p50"]
    assert spread["least"] <= spread["median"] <= spread["most"]


def test_long_prompts_are_shortened_to_the_context() -> None:
    async def main(server: FakeServer) -> Bench:
        async with bench_of(server, Plan(parse_workload("fixed:input=90,output=20"), CONSTANT,
                                         (10.0,), 3)) as bench:  # fmt: skip
            await bench.run(10.0, 0, "")
            return bench

    server = FakeServer(max_model_len=64)
    bench = run_virtual(main(server))
    assert bench.shortened == 3
    assert {len(body["prompt"]) + body["max_tokens"] for body in server.seen} == {64}


def test_a_duration_gives_the_number_of_requests() -> None:
    plan = replace(PLAN, seconds=2.5, evaluation=Evaluation({}, warmup=3))
    assert plan.size(4.0) == 13
    assert PLAN.size(4.0) == 40
