"""The next step is planned and launched before the tokens of this one are here: aborts and faults.

That outputs are the same is in `tests/matrix`. On a CPU a launched step is computed at once, but
its tokens are read late and the next step finds them where a GPU would, so all that the host may
get wrong is real here. With graphs (those of `test_graphs.py`) no token of a decode step comes from
the host at all.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import Failure
from minillm.execution import collect, runner
from minillm.execution.state import SequenceRow
from tests.engine.small import assert_idle, limit_steps, make, reasons, tokens
from tests.execution.test_graphs import PROMPTS, params_of
from tests.matrix.cells import give_graphs, poison

WITH_GRAPHS = (False, True)


def overlapped(folder: Path, monkeypatch: Any, graphs: bool, **fields: Any) -> LLM:
    llm = make(folder, async_scheduling=True, **fields)
    limit_steps(llm, monkeypatch)
    if graphs:
        give_graphs(llm)
    poison(llm)
    return llm


KINDS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "ends by tokens": {"ignore_eos": False, "stop_token_ids": list(range(0, 256, 7))},
}


def requests(kind: str) -> list[SamplingParams]:
    return [params_of(index, **KINDS[kind]) for index in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[list[int]]]:
    llm = make(folder, async_scheduling=False)
    return list(map(tokens, llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)))


def test_metrics_are_those_of_the_trace(folder, monkeypatch):
    """And of an engine that does one thing after the other, but for the times."""
    llm, plain = overlapped(folder, monkeypatch, True), make(folder)
    for engine in (llm, plain):
        first = engine.generate(PROMPTS, requests("ends by tokens"), use_tqdm=False)
        again = engine.generate(PROMPTS, requests("as they are"), use_tqdm=False)
        outputs = [*first, *again]
        summaries = {one.request_id: one for one in engine.trace.requests()}
        assert len(summaries) == len(outputs)
        for output in outputs:
            metrics, summary = output.metrics, summaries[output.request_id]
            assert summary.num_tokens == (len(tokens(output)[0]),)
            assert summary.ends == tuple(reasons(output))
            assert summary.num_cached_tokens == metrics.num_cached_tokens
            assert summary.num_preemptions == metrics.num_preemptions
            assert summary.num_recomputed_tokens == metrics.num_recomputed_tokens
            for name in ("queue_time", "ttft", "tpot", "e2e"):
                assert getattr(summary, name) == pytest.approx(getattr(metrics, name), abs=1e-9)
    counted = [
        [getattr(output.metrics, name) for name in ("num_cached_tokens", "num_preemptions")]
        for output in llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    ]
    assert counted == [
        [getattr(output.metrics, name) for name in ("num_cached_tokens", "num_preemptions")]
        for output in plain.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    ]
    times = llm.trace.token_times()
    assert sum(map(len, times.values())) == sum(
        sum(summary.num_tokens) for summary in llm.trace.requests()
    )
    replay, records = llm.trace.snapshot()
    for record in records:
        replay.apply(record)
        assert record.started <= record.planned <= record.computed <= record.delivered
    assert not replay.sequences
    assert not any(replay.holders.values())


@pytest.mark.parametrize("graphs", WITH_GRAPHS)
@pytest.mark.parametrize("at", range(1, 8))
def test_aborts_between_steps(folder, expected, monkeypatch, at, graphs):
    llm = overlapped(folder, monkeypatch, graphs)
    engine, params = llm.engine, requests("as they are")
    lives = [
        engine.add(engine.make_request(str(index), None, prompt, params[index]))
        for index, prompt in enumerate(PROMPTS)
    ]
    for _ in range(at):
        engine.step()
    for name in ("4", "7", "7"):
        engine.abort(name)
    replacement = engine.add(engine.make_request("4", None, PROMPTS[4], params[4]))
    while engine.has_work:
        engine.step()
    for index, live in enumerate(lives):
        have, (want,) = tokens(live.output())[0], expected[index]
        if index in (4, 7):
            assert reasons(live.output()) == {"abort"}
            assert len(have) == min(at, len(want))
            assert have == want[: len(have)]
        else:
            assert have == want
    assert tokens(replacement.output()) == expected[4]
    assert_idle(engine)


@pytest.mark.parametrize("at", range(1, 5))
def test_nothing_is_under_way_when_nobody_is_left(folder, monkeypatch, at):
    llm = overlapped(folder, monkeypatch, True)
    engine = llm.engine
    for index in range(3):
        engine.add(engine.make_request(str(index), None, PROMPTS[index + 3], params_of(index + 3)))
    for _ in range(at):
        engine.step()
    for index in range(3):
        engine.abort(str(index))
    assert not engine.has_work
    assert_idle(engine)
    assert len(llm.trace) == engine.scheduler.counters.num_steps
    assert all(record.computed for record in llm.trace)
    assert engine.step() == []


@pytest.mark.parametrize("at", [1, 2, 3])
def test_the_only_request_is_aborted_while_a_step_is_launched(folder, monkeypatch, at):
    llm = overlapped(folder, monkeypatch, False)
    engine, calls = llm.engine, itertools.count(1)
    launch, launched = engine.runner.launch, []

    def interrupted(plan: Any) -> Any:
        launched.append(plan.step)
        if next(calls) == at:
            engine.abort("victim")
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", interrupted)
    request = engine.make_request("victim", None, PROMPTS[6], params_of(6))
    victim = engine.add(request)
    while engine.has_work:
        engine.step()
    assert reasons(victim.output()) == {"abort"}
    assert launched == list(range(1, len(launched) + 1))
    assert_idle(engine)
    assert engine.step() == []


# ---- faults ------------------------------------------------------------------------------------


def num_outputs(state: SequenceRow) -> int:
    return len(state.token_ids) - state.new.num_prompt_tokens


def failing(found: list[torch.Tensor], places: list[int]) -> list[torch.Tensor]:
    """Tokens and best logits, some of which are NaN."""
    tokens, best = (torch.tensor(each.tolist()) for each in found)
    best[places] = math.nan
    return [tokens, best]


def test_a_last_sample_that_fails_has_its_own_time(folder, monkeypatch):
    """No step is planned behind it, and the one before was committed late."""
    llm, give = overlapped(folder, monkeypatch, False), runner.give_tokens

    def wrong_last(taken: Any, read: Any, *rest: Any) -> None:
        late = num_outputs(taken[0][1]) == 8
        give(taken, (lambda: failing(read(), [0])) if late else read, *rest)

    monkeypatch.setattr(runner, "give_tokens", wrong_last)
    (output,) = llm.generate([PROMPTS[5]], params_of(5, max_tokens=9), use_tqdm=False)
    (summary,) = llm.trace.requests()
    assert (summary.ends, summary.num_tokens) == (("error",), (8,))
    assert summary.e2e == pytest.approx(output.metrics.e2e, abs=1e-9)


@pytest.mark.parametrize("graphs", WITH_GRAPHS)
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_sample_that_fails_ends_its_request_only(folder, expected, monkeypatch, step, graphs):
    llm = overlapped(folder, monkeypatch, graphs)
    give, victims = runner.give_tokens, [PROMPTS[5]]

    def wrong_once(taken: Any, read: Any, *rest: Any) -> None:
        found, wrong = read(), []
        for place, (_, state) in enumerate(taken):
            late = num_outputs(state) == step - 1
            if list(state.new.token_ids[: state.new.num_prompt_tokens]) in victims and late:
                wrong.append(place)
                victims.clear()
        give(taken, lambda: failing(found, wrong), *rest)

    monkeypatch.setattr(runner, "give_tokens", wrong_once)
    monkeypatch.setattr(
        collect,
        "failure_of",
        lambda value: Failure("Planted.", "model") if value != value else None,
    )
    outputs = llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    for index, (output, right) in enumerate(zip(outputs, expected, strict=True)):
        (have,), (want,) = tokens(output), right
        if index == 5:
            assert (output.outputs[0].finish_reason, output.outputs[0].error) == (
                "error",
                "Planted.",
            )
            assert have == want[: step - 1]
        else:
            assert have == want
    assert_idle(llm.engine)
    (summary,) = (one for one in llm.trace.requests() if one.ends == ("error",))
    assert summary.num_tokens == (step - 1,)
    assert summary.e2e == pytest.approx(outputs[5].metrics.e2e, abs=1e-9)


# ---- who has it --------------------------------------------------------------------------------


def test_a_cpu_does_one_thing_after_the_other_unless_it_is_asked(folder):
    assert not make(folder).engine.overlaps
    assert not make(folder, async_scheduling=False).engine.overlaps
    assert make(folder, async_scheduling=True).engine.overlaps
    with pytest.raises(ValueError, match="async_scheduling is 'yes'; it must be a bool or None"):
        make(folder, async_scheduling="yes")
