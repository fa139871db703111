"""The synchronous interface with many requests at once: streams in turns, left early, or paused."""

import dataclasses
import gc
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput
from minillm.errors import InvalidRequestError
from minillm.scheduling.request import Status
from tests.engine.small import BLOCK_SIZE, assert_idle, limit_steps, make, reasons, tokens
from tests.pairs import pairwise

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
FIRST, SECOND, THIRD = list(range(60, 79)), list(range(30, 41)), [5, 6, 7]


@pytest.fixture
def llm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> LLM:
    engine = make(folder)
    limit_steps(engine, monkeypatch)
    return engine


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[..., list[list[int]]]:
    """The tokens of a prompt on an engine that does nothing else."""
    plain = make(folder, enable_prefix_caching=False)

    def run(prompt: list[int], params: SamplingParams = PARAMS) -> list[list[int]]:
        return tokens(plain.generate([prompt], params, use_tqdm=False)[0])

    return run


# ---- streams --------------------------------------------------------------------------------


def drop(stream: list) -> None:
    stream.clear()
    gc.collect()


def close(stream: list) -> None:
    stream[0].close()


def fail_in_the_consumer(stream: list) -> None:
    def consume() -> None:
        for _ in stream.pop():
            raise LookupError

    with pytest.raises(LookupError):
        consume()
    gc.collect()


@pytest.mark.parametrize(
    ("leave", "num_read", "n"), pairwise([drop, close, fail_in_the_consumer], [0, 1, 5, 15], [1, 3])
)
def test_a_stream_that_is_left_gives_its_blocks_back(llm, alone, leave, num_read, n):
    params = SamplingParams(n=n, temperature=0.8, seed=3, max_tokens=18, ignore_eos=True)
    stream = [llm.stream(FIRST, params)]
    for _ in range(num_read):
        next(stream[0])
    assert llm.engine.has_work == bool(num_read)
    leave(stream)
    assert_idle(llm.engine)
    assert tokens(llm.generate([FIRST], PARAMS, use_tqdm=False)[0]) == alone(FIRST)


def test_a_stream_that_nobody_begins_is_no_request(llm):
    stream = llm.stream(FIRST, PARAMS)
    assert_idle(llm.engine)
    llm.generate([SECOND], PARAMS, use_tqdm=False)
    assert len(list(stream)) == PARAMS.max_tokens


def assert_cumulative(outputs: list[RequestOutput], right: list[list[int]]) -> None:
    for earlier, later in itertools.pairwise(outputs):
        for before, now in zip(earlier.outputs, later.outputs, strict=True):
            assert now.token_ids[: len(before.token_ids)] == before.token_ids
            assert now.text.startswith(before.text)
        assert sum(map(len, tokens(later))) > sum(map(len, tokens(earlier)))
    assert tokens(outputs[-1]) == right
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("pattern", ["ab", "aab", "abbb", "aaaaaaaab"])
def test_two_streams_in_turns(llm, alone, pattern):
    streams = {"a": llm.stream(FIRST, PARAMS), "b": llm.stream(SECOND, PARAMS)}
    seen: dict[str, list[RequestOutput]] = {"a": [], "b": []}
    for name in itertools.islice(itertools.cycle(pattern), 400):
        output = next(streams[name], None)
        if output is not None:
            seen[name].append(output)
    assert_cumulative(seen["a"], alone(FIRST))
    assert_cumulative(seen["b"], alone(SECOND))
    assert_idle(llm.engine)


@pytest.mark.parametrize("num_read", [1, 3])
@pytest.mark.parametrize("prompts", [[THIRD], [THIRD, SECOND, FIRST]])
def test_a_stream_goes_on_where_it_is_after_a_pause(llm, alone, num_read, prompts):
    """What came while nobody read is in the next output: cumulative, each token once."""
    stream = llm.stream(FIRST, PARAMS)
    seen = [next(stream) for _ in range(num_read)]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert list(map(tokens, outputs)) == [alone(prompt, GREEDY) for prompt in prompts]
    seen += stream
    assert_cumulative(seen, alone(FIRST))
    assert len(seen) < PARAMS.max_tokens, "the pause was none"
    assert_idle(llm.engine)


def test_a_stream_that_ended_during_a_pause_still_gives_its_end(llm, alone):
    stream = llm.stream(FIRST, GREEDY)
    first = next(stream)
    llm.generate([SECOND], PARAMS, use_tqdm=False)
    assert not llm.engine.has_work
    (last,) = stream
    assert_cumulative([first, last], alone(FIRST, GREEDY))


def test_a_stream_of_a_closed_engine_ends_as_aborted(llm):
    stream = llm.stream(FIRST, PARAMS)
    next(stream)
    llm.close()
    (last,) = stream
    assert (last.finished, reasons(last)) == (True, {"abort"})


# ---- many prompts ---------------------------------------------------------------------------


def test_no_prompt_is_no_work(llm, capsys):
    assert llm.generate([], PARAMS) == []
    assert llm.score([]) == []
    assert capsys.readouterr() == ("", "")


def test_three_thousand_prompts(folder):
    llm = make(folder, num_gpu_blocks_override=512, max_model_len=32, max_num_seqs=128)
    prompts = [[number % 256, number // 256, 7] for number in range(3000)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(tokens(output)[0]) == 2 and output.finished for output in outputs)
    assert len({output.request_id for output in outputs}) == 3000
    assert llm.engine.scheduler.counters.max_num_running == 128
    assert_idle(llm.engine)
    again = llm.generate(prompts[1500:1510], params, use_tqdm=False)
    assert list(map(tokens, again)) == list(map(tokens, outputs[1500:1510]))
    assert not {o.request_id for o in again} & {o.request_id for o in outputs}


def set_clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """For the progress bar, every look at the clock comes so long after the last one."""
    ticks, works = itertools.count(0, seconds), tqdm.std.tqdm.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        works(self, *args, **kwargs)
        if not self.disable:
            self._time = lambda: next(ticks)
            self.start_t = self.last_print_t = next(ticks)

    monkeypatch.setattr(tqdm.std.tqdm, "__init__", init)


def test_the_progress_bar_counts_requests_and_tells_the_speed(llm, monkeypatch, capsys):
    set_clock(monkeypatch, 2.0)
    llm.generate([FIRST, SECOND, THIRD], PARAMS)
    out, err = capsys.readouterr()
    assert out == ""
    assert "Generating" in err
    assert "3/3" in err
    assert "tokens/s" in err


@pytest.mark.parametrize("use_tqdm", [False, True])
def test_no_bar_where_none_is_wanted_or_needed(llm, monkeypatch, capsys, use_tqdm):
    """A run of less than a second shows nothing, not even an empty line."""
    set_clock(monkeypatch, 0.0 if use_tqdm else 2.0)
    llm.generate([FIRST, SECOND], GREEDY, use_tqdm=use_tqdm)
    assert capsys.readouterr() == ("", "")


# ---- priorities, salts ----------------------------------------------------------------------


def test_the_lowest_priority_goes_first(folder, alone, monkeypatch):
    llm = make(folder, scheduling_policy="priority", max_num_seqs=1)
    limit_steps(llm, monkeypatch)
    prompts, admitted = [FIRST, SECOND, THIRD, [9, 9]], []
    schedule = llm.engine.scheduler.schedule

    def watched() -> Any:
        plan = schedule()
        known = llm.engine.scheduler.sequences
        admitted.extend(known[new.seq_id].request.request_id for new in plan.new)
        return plan

    monkeypatch.setattr(llm.engine.scheduler, "schedule", watched)
    outputs = llm.generate(prompts, PARAMS, use_tqdm=False, priority=[3, 1, 2, 1])
    assert admitted == ["1", "3", "2", "0"]
    assert list(map(tokens, outputs)) == list(map(alone, prompts))


def test_priorities_without_the_policy_are_refused(llm):
    with pytest.raises(InvalidRequestError, match="scheduling_policy='priority'"):
        llm.generate([FIRST], PARAMS, priority=[1])
    assert_idle(llm.engine)


@pytest.mark.parametrize("bad", [[1], [1, "x"], [1, True], 3, "ab", [1, 1.5]])
def test_bad_priorities_are_refused(folder, bad):
    llm = make(folder, scheduling_policy="priority")
    with pytest.raises(InvalidRequestError, match="priority is"):
        llm.generate([FIRST, SECOND], PARAMS, priority=bad)
    assert_idle(llm.engine)


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_hits_only_under_the_same_salt(folder, alone, cache):
    llm = make(folder, prefix_cache=cache)
    cached = []
    for salt in ("", "", "x", "y", "x", ""):
        prompt = {"prompt_token_ids": FIRST} | ({"cache_salt": salt} if salt else {})
        (output,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert tokens(output) == alone(FIRST)
        cached.append(output.metrics.num_cached_tokens)
    most = (len(FIRST) - 1) // BLOCK_SIZE * BLOCK_SIZE if cache == "hash" else len(FIRST) - 1
    assert cached == [0, most, 0, 0, most, most]


def test_a_salt_is_a_string(llm):
    with pytest.raises(InvalidRequestError, match="cache_salt"):
        llm.generate([{"prompt_token_ids": FIRST, "cache_salt": 3}], PARAMS)


# ---- metrics --------------------------------------------------------------------------------


def test_the_clock_of_an_ended_request_stands_still(llm):
    engine = llm.engine
    failing = SamplingParams(allowed_token_ids=[256], min_tokens=2, max_tokens=3)
    three = dataclasses.replace(failing, n=3)
    params = {"ends": GREEDY, "fails": failing, "fails thrice": three, "aborted in line": GREEDY}
    requests = [engine.make_request(name, None, FIRST, each) for name, each in params.items()]
    some = [*map(engine.add, [engine.make_scoring_request("scores", FIRST), *requests])]
    engine.abort("aborted in line")
    while engine.has_work:
        engine.step()
    assert [live.metrics() for live in some] == [live.metrics() for live in some]
    for live in some[:-1]:
        assert 0 < live.metrics().queue_time < live.metrics().e2e
    assert some[-1].metrics().queue_time == some[-1].metrics().e2e


def test_metrics_of_one_token_and_of_none(llm):
    one, none = llm.generate(
        [FIRST, SECOND],
        [
            SamplingParams(max_tokens=1, ignore_eos=True),
            SamplingParams(allowed_token_ids=[256], min_tokens=2, max_tokens=3),
        ],
        use_tqdm=False,
    )
    assert one.metrics.tpot is None
    assert one.metrics.ttft == one.metrics.e2e > one.metrics.queue_time
    assert reasons(none) == {"error"}
    assert (none.metrics.ttft, none.metrics.tpot) == (None, None)
    assert none.metrics.e2e > none.metrics.queue_time > 0


# ---- refused before anything runs -----------------------------------------------------------


def test_what_can_never_fit_is_refused_by_name_before_anything_runs(folder):
    llm = make(folder, num_gpu_blocks_override=10, max_model_len=40)
    several = [GREEDY, SamplingParams(n=7, max_tokens=20), GREEDY]
    why = "prompt 1: .*can never fit: 19 prompt .* n = 7, need 11 blocks of 4 positions, .* has 10"
    with pytest.raises(InvalidRequestError, match=why):
        llm.generate([THIRD, FIRST, THIRD], several, use_tqdm=False)
    assert llm.engine.scheduler.counters.num_steps == 0
    assert_idle(llm.engine)


def test_an_id_that_is_in_use_is_refused_and_leaves_nothing(llm):
    engine = llm.engine
    mine = engine.add(engine.make_request("1", None, FIRST, PARAMS))
    with pytest.raises(InvalidRequestError, match="unfinished request with the id '1'"):
        llm.generate([SECOND, THIRD, SECOND], PARAMS, use_tqdm=False)  # ids 0, 1, 2
    assert list(engine._live) == ["1"]
    while engine.has_work:
        engine.step()
    assert mine.output().finished
    assert_idle(engine)


# ---- two engines ----------------------------------------------------------------------------


def plain_parameters(runner):
    """Those whose memory can be asked for: what oneDNN packed it does not show."""
    return [each for each in runner.model.parameters() if each.layout is torch.strided]


def test_two_engines_share_nothing(folder, alone):
    one, other = make(folder), make(folder, num_gpu_blocks_override=20)
    assert one.engine.scheduler is not other.engine.scheduler
    first, second = one.engine.runner, other.engine.runner
    pairs = zip(plain_parameters(first), plain_parameters(second), strict=True)
    tables = first.rows.tables.device, second.rows.tables.device
    for mine, theirs in (*pairs, (first.kv.key, second.kv.key), tables):
        assert mine.untyped_storage().data_ptr() != theirs.untyped_storage().data_ptr()
    streams = [engine.stream(FIRST, PARAMS) for engine in (one, other)]
    for _ in range(4):
        for stream in streams:
            next(stream)
    with torch.inference_mode():  # packed weights were made in it
        for parameter in plain_parameters(second):
            parameter.zero_()
    other.close()
    *_, last = streams[0]
    assert tokens(last) == alone(FIRST)
    assert one.generate([FIRST], GREEDY, use_tqdm=False)[0].metrics.num_cached_tokens > 0
    fresh = make(folder).generate([FIRST], GREEDY, use_tqdm=False)[0]
    assert fresh.metrics.num_cached_tokens == 0


# ---- abort in every state -------------------------------------------------------------------


def has(llm: LLM, request_id: str) -> Any:
    return [
        s for s in llm.engine.scheduler.sequences.values() if s.request.request_id == request_id
    ]


STATES: dict[str, Callable[[Any], bool]] = {
    "waiting": lambda s: s.status is Status.WAITING and s.num_computed == 0,
    "in a prompt": lambda s: s.status is Status.RUNNING and 0 < s.num_computed < 18,
    "decoding": lambda s: s.status is Status.RUNNING and s.num_tokens > 22,
    "preempted": lambda s: s.num_preemptions > 0 and s.status is Status.WAITING,
    "resumed": lambda s: s.num_preemptions > 0 and s.status is Status.RUNNING,
    "swapped out": lambda s: s.is_swapped,
}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("state", STATES)
def test_abort_in_every_state(folder, alone, monkeypatch, state, n):
    swap = 0.001 if state == "swapped out" else 0
    llm = make(
        folder, num_gpu_blocks_override=16, max_num_batched_tokens=8, max_num_seqs=8,
        swap_space=swap, max_model_len=48,
    )  # fmt: skip
    limit_steps(llm, monkeypatch)
    engine = llm.engine
    params = SamplingParams(n=n, temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    longer = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
    others = [engine.add(engine.make_request(str(i), None, SECOND, longer)) for i in range(2)]
    victim = engine.add(engine.make_request("victim", None, FIRST, params))
    while not any(STATES[state](sequence) for sequence in has(llm, "victim")):
        assert not victim.finished, "it was never in this state"
        engine.step()
    engine.abort("victim")
    engine.abort("victim")
    engine.abort("unknown")
    assert not has(llm, "victim")
    aborted = victim.output()
    assert (aborted.finished, reasons(aborted)) == (True, {"abort"})
    for have, whole in zip(tokens(aborted), alone(FIRST, params), strict=True):
        assert have == whole[: len(have)]
    while engine.has_work:
        engine.step()
    assert [tokens(live.output()) for live in others] == [alone(SECOND, longer)] * 2
    assert_idle(engine)


@pytest.mark.parametrize(
    ("overlaps", "at", "n", "again"), pairwise([False, True], [1, 2, 4], [1, 3], [False, True])
)
def test_abort_while_the_model_runs(folder, alone, monkeypatch, overlaps, at, n, again):
    """From a signal handler, say. The id may be in use again before the step ends."""
    llm = make(folder, async_scheduling=overlaps)
    limit_steps(llm, monkeypatch)
    engine, calls = llm.engine, itertools.count(1)
    params = SamplingParams(n=n, temperature=0.8, seed=3, max_tokens=9, ignore_eos=True)
    launch, added = engine.runner.launch, []

    def interrupted(plan: Any) -> Any:
        if next(calls) == at:
            engine.abort("victim")
            if again:
                added.append(engine.add(engine.make_request("victim", None, THIRD, PARAMS)))
        return launch(plan)

    monkeypatch.setattr(engine.runner, "launch", interrupted)
    other = engine.add(engine.make_request("other", None, SECOND, PARAMS))
    victim = engine.add(engine.make_request("victim", None, FIRST, params))
    while engine.has_work:
        engine.step()
    assert reasons(victim.output()) == {"abort"}
    # The tokens of the step before are not there yet; completions that part sit out one step.
    ahead = overlaps * ((at > 1) + (n > 1 and at > 3))
    assert [len(each) for each in tokens(victim.output())] == [at - 1 - ahead] * n
    assert tokens(other.output()) == alone(SECOND)
    assert [tokens(live.output()) for live in added] == [alone(THIRD)] * again
    assert_idle(engine)


def test_generate_ends_when_somebody_aborts_its_requests(llm, monkeypatch):
    engine, calls = llm.engine, itertools.count(1)
    step = engine.step

    def interrupted() -> Any:
        if next(calls) == 3:
            for request_id in list(engine._live):
                engine.abort(request_id)
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    for output in llm.generate([FIRST, SECOND], PARAMS, use_tqdm=False):
        assert (reasons(output), len(tokens(output)[0])) == ({"abort"}, 2)


def test_inference_mode_does_not_leak_out_of_a_stream(llm):
    stream = llm.stream(FIRST, PARAMS)
    next(stream)
    assert not torch.is_inference_mode_enabled()
    stream.close()


@pytest.mark.parametrize("kind", ["hash", "radix"])
def test_cached_prefixes_can_be_forgotten_also_while_somebody_reads_them(folder, kind):
    llm = LLM(folder, dtype="float32", block_size=4, prefix_cache=kind)
    prompt, params = list(range(20, 40)), SamplingParams(temperature=0, max_tokens=6)
    expected, again = (llm.generate(prompt, params, use_tqdm=False)[0] for _ in range(2))
    assert again.metrics.num_cached_tokens >= 16
    reader = llm.stream(prompt, params)
    next(reader)
    assert llm.reset_prefix_cache()
    *_, last = reader
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    fresh = llm.generate(prompt, params, use_tqdm=False)[0]
    assert fresh.metrics.num_cached_tokens == 0
    assert fresh.outputs[0].token_ids == expected.outputs[0].token_ids
    assert_idle(llm.engine)
