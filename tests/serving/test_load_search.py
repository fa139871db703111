"""The search finds the rate at which a planted server is overloaded."""

import asyncio
import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minillm.lab.benchmarks.serving.bench import Bench, Plan
from minillm.lab.benchmarks.serving.client import Fields
from minillm.lab.benchmarks.serving.measurement import Wanted, collected
from minillm.lab.benchmarks.serving.prompts import Vocabulary, Writer
from minillm.lab.benchmarks.serving.reply import Reply
from minillm.lab.benchmarks.serving.slo import parse_slo
from minillm.lab.benchmarks.serving.summary import Evaluation
from minillm.lab.benchmarks.serving.sweep import MOST_STEPS, Found, highest_rate, knee, search
from minillm.lab.benchmarks.serving.target import Target
from minillm.lab.benchmarks.serving.workload import Arrivals, parse_workload
from tests.serving.virtual_time import run_virtual


def found_for(limit: float, start: float, tolerance: float) -> tuple[Found, list[float]]:
    """The search on a server that keeps its SLO exactly up to `limit`."""
    tried: list[float] = []

    async def attainment(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= limit else 0.5

    return asyncio.run(highest_rate(attainment, start, 0.9, tolerance)), tried


@given(
    limit=st.floats(0.01, 500),
    start=st.floats(0.5, 20),
    tolerance=st.sampled_from([0.01, 0.05, 0.2]),
)
def test_the_limit_is_within_the_bounds(limit: float, start: float, tolerance: float) -> None:
    found, tried = found_for(limit, start, tolerance)
    assert found.keeps is not None
    assert found.misses is not None
    assert found.keeps <= limit < found.misses
    assert found.misses <= found.keeps * (1 + tolerance)
    assert len(set(tried)) == len(tried) == len(found.probes)


def test_a_limit_out_of_reach() -> None:
    never, tried = found_for(0.0, 1.0, 0.05)
    assert (never.keeps, never.misses) == (None, 2.0**-MOST_STEPS)
    assert len(tried) == MOST_STEPS + 1
    always, _ = found_for(math.inf, 1.0, 0.05)
    assert (always.keeps, always.misses) == (2.0**MOST_STEPS, None)


@dataclass
class Queue:
    """A server, instead of the network: `slots` requests at once, 0.4 s each, first token after
    0.1 s of service."""

    slots: int

    async def send(self, reply: Reply, path: str, body: bytes) -> None:
        """Wait for a slot, then reply on the schedule."""
        clock = asyncio.get_running_loop().time
        reply.sent = clock()
        async with self.places:
            for wait in (0.1, 0.3):
                await asyncio.sleep(wait)
                reply.frames.append(clock())
                reply.texts.append(clock())
        reply.end, reply.status = clock(), 200
        reply.prompt_tokens, reply.output_tokens = 10, 4

    def __post_init__(self) -> None:
        self.places = asyncio.Semaphore(self.slots)


def planted(slots: int) -> dict[str, Any]:
    """The whole benchmark with --search on a server with a capacity of slots / 0.4 s."""

    async def main() -> dict[str, Any]:
        evaluation = Evaluation(parse_slo("ttft=500ms"))
        workload = parse_workload("fixed:input=10,output=4")
        plan = Plan(workload, Arrivals(1.0, math.inf), (1.0,), 200, evaluation=evaluation)
        writer = Writer(Fields("m", False), Vocabulary(ids=(1, 2, 3)), True)
        target = Target("http://queue", "m", "m", None, "")
        client: Any = Queue(slots)
        bench = Bench(plan, target, client, writer, lambda text: None, polled=0.0)
        wanted = Wanted(plan, search=True, tolerance=0.01)
        points, found = await search(bench, wanted.target, wanted.tolerance)
        return collected(wanted, bench, points, found)

    found: dict[str, Any] = run_virtual(main(), grace=0.0)
    return found


@pytest.mark.parametrize("slots", [2, 4])
def test_the_search_finds_a_planted_knee(slots: int) -> None:
    """Capacity c = slots / 0.4 s. At a rate r above it, request i waits about i * (1/c - 1/r), and
    90% of 200 requests have a TTFT of 0.5 s if 180 * (1/c - 1/r) <= 0.4 s."""
    capacity = slots / 0.4
    limit = 1 / (1 / capacity - 0.4 / 180)
    found = planted(slots)
    keeps, misses = found["search"]["keeps"], found["search"]["misses"]
    assert keeps == pytest.approx(limit, rel=0.02)
    assert keeps < misses <= keeps * 1.01
    assert found["search"]["keeps_attainment"] >= 0.9 > found["search"]["misses_attainment"]
    assert found["knee"]["load"] == keeps


def at(load: float, throughput: float, attainment: float | None = None) -> dict[str, Any]:
    share = None if attainment is None else {"median": attainment}
    return {"load": load, "output_throughput": {"median": throughput}, "attainment": share}


def test_there_is_no_knee_without_an_slo() -> None:
    assert knee([at(load, 100.0) for load in (1, 2, 3)], 0.9) is None
    assert knee([], 0.9) is None
