"""The next step is planned and launched before the tokens of this one are here: same outputs.

On a CPU a launched step is computed at once, but its tokens are read late and the next step finds
them where a GPU would, so all that the host may get wrong is real here. With graphs (those of
`test_graphs.py`) no token of a decode step comes from the host at all.
"""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.engine.completion import Completion
from minillm.errors import EngineDeadError, Failure
from minillm.execution import collect, runner
from minillm.execution.runner import Runner
from minillm.execution.state import SequenceRow
from minillm.sampling.sampler import Sampler
from minillm.scheduling.scheduler import Scheduler
from minillm.text.detokenizer import IncrementalDetokenizer
from tests.engine.small import (
    EOS,
    assert_idle,
    limit_steps,
    make,
    num_ahead,
    reasons,
    tokens,
    write_model,
)
from tests.execution.test_graphs import PROMPTS, SETTINGS, give_graphs, params_of, poison
from tests.pairs import pairwise

WITH_GRAPHS = (False, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-model"))


def overlapped(folder: Path, monkeypatch: Any, graphs: bool, **fields: Any) -> LLM:
    llm = make(folder, async_scheduling=True, **fields)
    limit_steps(llm, monkeypatch)
    if graphs:
        give_graphs(llm)
    poison(llm)
    return llm


def everything(output: RequestOutput) -> list[Any]:
    """What a user sees, but for times."""
    ends = [(each.finish_reason, each.stop_reason, each.text) for each in output.outputs]
    numbers = [each.logprobs for each in output.outputs], output.prompt_logprobs
    return [tokens(output), ends, numbers]


KINDS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "ends by tokens": {"ignore_eos": False, "stop_token_ids": list(range(0, 256, 7))},
    "ends by text": {"stop": ["e", "7", "q"], "ignore_eos": False},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"presence_penalty": 0.9, "repetition_penalty": 1.3},
    "min tokens": {"min_tokens": 4, "ignore_eos": False, "stop_token_ids": list(range(0, 256, 3))},
    "bad words": {"bad_words": ["a", "b", "c"], "logit_bias": {5: 4.0}},
    "forks": {"n": 3},
    "forks that stop": {"n": 3, "ignore_eos": False, "stop_token_ids": list(range(0, 256, 5))},
    "one token": {"max_tokens": 1},
}


def requests(kind: str) -> list[SamplingParams]:
    params = []
    for index in range(len(PROMPTS)):
        fields = dict(KINDS[kind])
        if "forks" in kind and params_of(index).greedy:
            fields["temperature"] = 0.7
        params.append(params_of(index, **fields))
    return params


@pytest.fixture(scope="module")
def expected(folder: Path) -> Any:
    known: dict[str, Any] = {}

    def of(kind: str) -> list[list[Any]]:
        if kind not in known:
            llm = make(folder, async_scheduling=False)
            known[kind] = list(
                map(everything, llm.generate(PROMPTS, requests(kind), use_tqdm=False))
            )
        return known[kind]

    return of


@pytest.mark.parametrize("graphs", WITH_GRAPHS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_outputs(folder, expected, monkeypatch, kind, graphs):
    llm = overlapped(folder, monkeypatch, graphs)
    have = list(map(everything, llm.generate(PROMPTS, requests(kind), use_tqdm=False)))
    if kind in ("logprobs",):  # numbers of other batches differ in the last bits
        assert [each[:2] for each in have] == [each[:2] for each in expected(kind)]
    else:
        assert have == expected(kind)
    assert_idle(llm.engine)
    assert (num_ahead(llm) > 5) == (kind != "one token")


ROOM_KINDS = ("as they are", "ends by tokens", "forks that stop", "penalties")


@pytest.mark.parametrize(
    ("setting", "kind", "graphs"), pairwise([*SETTINGS], ROOM_KINDS, WITH_GRAPHS)
)
def test_the_same_outputs_where_there_is_little_room(
    folder, expected, monkeypatch, setting, kind, graphs
):
    llm = overlapped(folder, monkeypatch, graphs, **SETTINGS[setting])
    have = list(map(everything, llm.generate(PROMPTS, requests(kind), use_tqdm=False)))
    assert have == expected(kind)
    assert_idle(llm.engine)
    assert num_ahead(llm) > 5
    counters = llm.engine.scheduler.counters
    if kind == "as they are":
        assert bool(counters.num_preemptions_recompute) == (setting == "recompute")
        assert bool(counters.num_preemptions_swap) == (setting == "swap")


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


def test_a_trace_is_saved_and_read(folder, monkeypatch, tmp_path):
    llm = overlapped(folder, monkeypatch, True)
    llm.generate(PROMPTS, requests("ends by tokens"), use_tqdm=False)
    llm.trace.save(tmp_path / "t.jsonl")
    again = type(llm.trace).load(tmp_path / "t.jsonl")
    assert list(again) == list(llm.trace)
    assert again.requests() == llm.trace.requests()
    assert again.chrome_events()
    assert again.html()


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
    right = expected("as they are")
    for index, live in enumerate(lives):
        have, (want,) = tokens(live.output())[0], right[index][0]
        if index in (4, 7):
            assert reasons(live.output()) == {"abort"}
            assert len(have) == min(at, len(want))
            assert have == want[: len(have)]
        else:
            assert have == want
    assert tokens(replacement.output()) == right[4][0]
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


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("at", [1, 2, 4])
def test_an_abort_while_a_step_is_launched(folder, expected, monkeypatch, at, again):
    """From a signal handler, say."""
    llm = overlapped(folder, monkeypatch, False)
    engine, calls, params = llm.engine, itertools.count(1), requests("as they are")
    launch, added = engine.runner.launch, []

    def interrupted(plan: Any) -> Any:
        if next(calls) == at:
            engine.abort("victim")
            if again:
                request = engine.make_request("victim", None, PROMPTS[2], params[2])
                added.append(engine.add(request))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", interrupted)
    other = engine.add(engine.make_request("other", None, PROMPTS[5], params[5]))
    victim = engine.add(engine.make_request("victim", None, PROMPTS[6], params[6]))
    while engine.has_work:
        engine.step()
    right = expected("as they are")
    assert reasons(victim.output()) == {"abort"}
    have = tokens(victim.output())[0]
    assert have == right[6][0][0][: len(have)]
    assert len(have) < at
    assert tokens(other.output()) == right[5][0]
    assert [tokens(live.output()) for live in added] == [right[2][0]] * again
    assert_idle(engine)


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


def test_a_stream_and_an_engine_that_is_closed_in_the_middle(folder, expected, monkeypatch):
    llm = overlapped(folder, monkeypatch, True)
    stream = llm.stream(PROMPTS[5], requests("as they are")[5])
    seen = [tokens(output)[0] for output in stream]
    (want,) = expected("as they are")[5][0]
    assert seen == [want[: count + 1] for count in range(len(want))]
    paused = llm.stream(PROMPTS[5], requests("as they are")[5])
    next(paused), next(paused)
    llm.close()
    llm.close()
    (last,) = paused
    assert reasons(last) == {"abort"}


def test_scores_are_the_same(folder, monkeypatch):
    texts = ["a text of several chunks", "another text that is long", "short"]
    llm = overlapped(folder, monkeypatch, True, max_num_batched_tokens=9, max_num_seqs=9)
    want = make(folder).score(texts)
    for have, right in zip(llm.score(texts), want, strict=True):
        assert have.num_tokens == right.num_tokens
        assert have.log_likelihood == pytest.approx(right.log_likelihood, rel=1e-5)
    assert_idle(llm.engine)


# ---- faults ------------------------------------------------------------------------------------

PLACES = {
    "schedule": (Scheduler, "schedule"),
    "schedule ahead": (Scheduler, "schedule_ahead"),
    "commit": (Scheduler, "commit"),
    "rows": (Runner, "_update_rows"),
    "blocks": (Runner, "_move_blocks"),
}
INTERRUPTED = PLACES | {
    "batch": (Runner, "batch"),
    "sampler": (Sampler, "choose"),
    "text": (IncrementalDetokenizer, "push"),
    "a completion grows": (Completion, "append"),
    "tokens are given": (runner, "give_tokens"),
}


def fail(patch: pytest.MonkeyPatch, place: Any, call: int, error: BaseException) -> None:
    owner, name = place
    if name == "schedule":  # from then on each step is planned ahead
        call = 1
    works, calls = getattr(owner, name), itertools.count(1)

    def broken(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            raise error
        return works(*arguments, **named)

    patch.setattr(owner, name, broken)


@pytest.mark.parametrize("call", [1, 3, 4])
@pytest.mark.parametrize("place", PLACES)
def test_the_engine_stops_with_one_clear_error(folder, monkeypatch, place, call):
    llm = overlapped(folder, monkeypatch, False)
    with monkeypatch.context() as patch:
        fail(patch, PLACES[place], call, RuntimeError("planted"))
        with pytest.raises(EngineDeadError, match="stopped: RuntimeError: planted"):
            llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    assert not llm.engine.has_work
    llm.close()


@pytest.mark.parametrize(
    ("setting", "place", "call"),
    pairwise(["one batch", "recompute", "swap"], [*INTERRUPTED], [1, 2, 5]),
)
def test_after_ctrl_c_the_engine_serves_again(folder, expected, monkeypatch, setting, place, call):
    llm = overlapped(folder, monkeypatch, False, **SETTINGS[setting])
    with monkeypatch.context() as patch:
        fail(patch, INTERRUPTED[place], call, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    assert_idle(llm.engine)
    have = llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    assert list(map(everything, have)) == expected("as they are")
    assert_idle(llm.engine)
    assert len(llm.trace) == llm.engine.scheduler.counters.num_steps


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
    for index, (output, right) in enumerate(zip(outputs, expected("as they are"), strict=True)):
        (have,), (want,) = tokens(output), right[0]
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


def test_a_row_that_fails_alone_fails_alone(folder, expected, monkeypatch):
    llm = overlapped(folder, monkeypatch, False)
    layer = llm.engine.runner.model.layers[1]
    works = layer.forward

    def forward(x: Any, residual: Any, rope: Any, batch: Any, kv: Any) -> Any:
        if bool((batch.positions == 16).any()) and len(batch.seq_lens) < 3:
            raise RuntimeError("planted")
        if bool((batch.positions == 16).any()):
            raise RuntimeError("together")
        return works(x, residual, rope, batch, kv)

    monkeypatch.setattr(layer, "forward", forward)
    outputs = llm.generate(PROMPTS, requests("as they are"), use_tqdm=False)
    for output, right in zip(outputs, expected("as they are"), strict=True):
        (have,), (want,) = tokens(output), right[0]
        if output.outputs[0].finish_reason == "error":
            assert "planted" in output.outputs[0].error
            assert have == want[: len(have)]
            assert len(output.prompt_token_ids) + len(have) in (17, len(output.prompt_token_ids))
        else:
            assert have == want
    assert {reason for output in outputs for reason in reasons(output)} == {"error", "length"}
    assert_idle(llm.engine)


# ---- who has it --------------------------------------------------------------------------------


def test_a_cpu_does_one_thing_after_the_other_unless_it_is_asked(folder):
    assert not make(folder).engine.overlaps
    assert not make(folder, async_scheduling=False).engine.overlaps
    assert make(folder, async_scheduling=True).engine.overlaps
    with pytest.raises(ValueError, match="async_scheduling is 'yes'; it must be a bool or None"):
        make(folder, async_scheduling="yes")


def test_an_end_of_sequence_is_the_last_token(folder, monkeypatch):
    """The one that was computed in vain behind it is nowhere."""
    llm = overlapped(folder, monkeypatch, True)
    params = SamplingParams(temperature=0.0, max_tokens=30, allowed_token_ids=[EOS])
    forced = SamplingParams(temperature=0.0, max_tokens=30, logit_bias={EOS: 100.0})
    for each in (params, forced):
        (output,) = llm.generate([PROMPTS[2]], each, use_tqdm=False)
        assert (tokens(output), reasons(output)) == ([[EOS]], {"stop"})
    assert_idle(llm.engine)
