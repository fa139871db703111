"""500 requests at once, many of which are cancelled at a stage that was drawn for them before.

The step thread stops at four moments of each step and lets the event loop cancel whoever has
reached his stage by then, so that every stage is hit at every moment, on any machine.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncLLMEngine, SamplingParams
from minillm.engine.loop import Engine
from minillm.scheduling.request import Status
from minillm.serving import async_engine
from minillm.serving.step_thread import Ticket
from tests.engine.small import make, tokens
from tests.scheduling.invariants import check_invariants
from tests.serving.async_small import Gate, idle, in_loop, run

NUM_REQUESTS = 500
STAGES = ("outside", "queued", "prefill", "decode", "preempted")
MOMENTS = ("between steps", "before the plan", "while the model runs", "after the step")
LEAST_HITS = 3  # of every stage at every moment
SETTINGS: dict[str, dict[str, Any]] = {
    "recompute": {"num_gpu_blocks_override": 30},
    "swap": {"num_gpu_blocks_override": 30, "swap_space": 0.01, "scheduling_policy": "priority"},
}


@dataclass
class Job:
    """One request, and what is to happen to it."""

    number: int
    prompt: list[int]
    params: SamplingParams
    priority: int
    fate: tuple[str, str]  # a stage and a moment, or what its consumer does
    patience: int  # tokens that it has at least when it is cancelled in decode
    seen: list[list[int]] = field(default_factory=list)
    seen_when_cancelled: int | None = None
    task: asyncio.Task | None = None


def draw_job(number: int, dice: random.Random) -> Job:
    shared = [7] * dice.choice([0, 0, 12])
    chance = dice.random()
    if chance < 0.55:
        fate = (dice.choice(STAGES), dice.choice(MOMENTS))
    elif chance < 0.60:
        fate = ("tokenising", "")
    else:
        fate = (dice.choice(["reads", "reads", "reads", "raises", "breaks", "is slow"]), "")
    return Job(
        number,
        [*shared, *(dice.randrange(256) for _ in range(dice.randrange(2, 24)))],
        SamplingParams(temperature=0, max_tokens=dice.randrange(6, 24), ignore_eos=True),
        dice.randrange(3),
        fate,
        dice.randrange(1, 4),
    )


@pytest.fixture(scope="module")
def jobs() -> Callable[[], list[Job]]:
    def draw() -> list[Job]:
        dice = random.Random(20)
        return [draw_job(number, dice) for number in range(NUM_REQUESTS)]

    return draw


@pytest.fixture(scope="module")
def expected(folder: Path, jobs: Callable[[], list[Job]]) -> list[list[int]]:
    """What `LLM.generate` gives."""
    drawn, llm = jobs(), make(folder, num_gpu_blocks_override=2000)
    outputs = llm.generate([j.prompt for j in drawn], [j.params for j in drawn], use_tqdm=False)
    return [tokens(output)[0] for output in outputs]


def stage_of(ticket: Ticket) -> str:
    """Where a request is, seen from the step thread."""
    if ticket.request is None:
        return "tokenising"
    if ticket.live is None:
        return "outside"
    if ticket.live.sequences[0].status is Status.WAITING:
        return "queued" if ticket.live.sequences[0].report is None else "preempted"
    return "decode" if ticket.live.completions[0].token_ids else "prefill"


class Executioner:
    """Cancels every job at its stage and moment, and counts."""

    def __init__(self, engine: AsyncLLMEngine, jobs: list[Job], patch: pytest.MonkeyPatch):
        self.engine, self.jobs = engine, jobs
        self.loop = asyncio.get_running_loop()
        self.hits: Counter[tuple[str, str]] = Counter()
        inner, steps = engine._engine, engine._steps
        take, step, launch = steps._take_commands, inner.step, inner.runner.launch

        def between(wait: bool) -> None:
            check_invariants(inner.scheduler)
            self.strike("between steps")
            take(wait)

        def stepping() -> Any:
            self.strike("before the plan")
            stepped = step()
            self.strike("after the step")
            return stepped

        def executing(plan: Any) -> Any:
            flight = launch(plan)
            self.strike("while the model runs")
            return flight

        patch.setattr(steps, "_take_commands", between)
        patch.setattr(inner, "step", stepping)
        patch.setattr(inner.runner, "launch", executing)

    def strike(self, moment: str) -> None:
        """In the step thread: the event loop cancels those whose time has come, and says so."""
        victims = []
        for request_id, ticket in self.engine._steps._tickets.items():
            job, stage = self.jobs[int(request_id)], stage_of(ticket)
            patient = stage == "decode" and len(ticket.live.completions[0].token_ids) < job.patience
            # Some stages are rare: the first ones there are taken, whatever was drawn for them.
            chosen = [where for _, where in victims].count((stage, moment))
            rare = self.hits[stage, moment] + chosen < LEAST_HITS
            if (job.fate == (stage, moment) or rare) and not patient and not ticket.ended:
                victims.append((job, (stage, moment)))
        if victims:
            in_loop(self.loop, lambda: [self.cancel(*victim) for victim in victims])

    def cancel(self, job: Job, where: tuple[str, str]) -> None:
        """In the event loop."""
        if job.task.cancel():  # its consumer has not ended by itself
            job.seen_when_cancelled = len(job.seen)
            self.hits[where] += 1


async def consume(engine: AsyncLLMEngine, job: Job) -> None:
    """Read a stream as its fate wants it."""
    prompt = {"prompt_token_ids": job.prompt}
    stream = engine.generate(prompt, job.params, str(job.number), job.priority)
    async for output in stream:
        job.seen.append(tokens(output)[0])
        if job.fate[0] == "raises" and len(job.seen) >= job.patience:
            raise LookupError("the consumer's own")
        if job.fate[0] == "breaks" and len(job.seen) >= job.patience:
            break
        if job.fate[0] == "is slow":
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_500_requests_with_random_cancellation(engine_of, jobs, expected, monkeypatch, setting):
    drawn = jobs()
    policy = SETTINGS[setting].get("scheduling_policy")
    for job in drawn:
        job.priority *= policy == "priority"
    limits = {"max_num_requests": 48, "max_num_seqs": 12, "max_num_batched_tokens": 24}
    engine = engine_of(**limits, **SETTINGS[setting])
    make_request = Engine.make_request
    long = {tuple(job.prompt) for job in drawn if job.number % 10 == 0}
    long |= {tuple(job.prompt) for job in drawn if job.fate[0] == "tokenising"}
    monkeypatch.setattr(async_engine, "is_long", lambda text, ids: tuple(ids) in long)

    async def main() -> None:
        gate = Gate(engine, monkeypatch)
        executioner = Executioner(engine, drawn, monkeypatch)

        def tokenising(self: Engine, request_id: str, *rest: Any) -> Any:
            job = drawn[int(request_id)]
            if job.fate[0] == "tokenising":
                in_loop(executioner.loop, lambda: executioner.cancel(job, job.fate))
            return make_request(self, request_id, *rest)

        monkeypatch.setattr(Engine, "make_request", tokenising)
        gate.shut()
        for job in drawn:
            job.task = asyncio.create_task(consume(engine, job))
        await gate.reached()
        assert engine.num_unfinished > NUM_REQUESTS * 0.9
        gate.open()
        results = await asyncio.gather(*(job.task for job in drawn), return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task(), *test_tasks}
        check(drawn, results, expected)
        counters = engine._engine.scheduler.counters
        assert counters.num_preemptions_recompute + counters.num_preemptions_swap > 10
        assert counters.num_mixed_steps > 50
        for fate in [*((s, m) for s in STAGES for m in MOMENTS), ("tokenising", "")]:
            assert executioner.hits[fate] >= LEAST_HITS, (fate, executioner.hits)
        await idle(engine)

    test_tasks: set[asyncio.Task] = set()
    run(main())


def check(drawn: list[Job], results: list[Any], expected: list[list[int]]) -> None:
    """Nothing came after a cancellation, and all others got what `LLM.generate` gives."""
    ways: Counter[str] = Counter()
    for job, result, right in zip(drawn, results, expected, strict=True):
        for seen in job.seen:
            assert seen == right[: len(seen)]
        assert all(a < b for a, b in zip(job.seen, job.seen[1:], strict=False))
        if job.seen_when_cancelled is not None:
            assert isinstance(result, asyncio.CancelledError)
            assert len(job.seen) == job.seen_when_cancelled, "an output came after the end"
            ways["cancelled"] += 1
        elif job.fate[0] == "raises" and isinstance(result, LookupError):
            ways["raised"] += 1
        elif job.fate[0] == "breaks" and job.seen[-1] != right:
            ways["broke"] += 1
        else:
            assert result is None
            assert job.seen[-1] == right
            ways["slow" if job.fate[0] == "is slow" else "read"] += 1
    assert ways["cancelled"] > 150, ways
    assert min(ways["raised"], ways["broke"], ways["slow"]) > 10, ways
    assert ways["read"] > 100, ways
