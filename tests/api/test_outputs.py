"""Outputs of a request: the same text and end whenever they are read, whole or as what is new."""

import dataclasses
import logging
import pickle
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minillm import CompletionOutput, RequestOutput, SamplingParams
from minillm.api.outputs import PrefixReport, joined
from minillm.api.sampling_params import RequestOutputKind
from minillm.engine.completion import Completion
from minillm.engine.live_request import LiveRequest
from minillm.scheduling.request import Request, Sequence
from minillm.serving import stat_logger
from minillm.text.stop import StopStrings
from minillm.text.tokenizer import Tokenizer
from tests.engine.small import assert_idle, limit_steps, make, reasons, tokens
from tests.text.build import KINDS
from tests.trace.drafts import Truth, speculating

DELTA, FINAL_ONLY = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
PROMPTS = [[5 + i, 60, 7, 99 - i, 12 + 2 * i] * (1 + i % 3) for i in range(4)]
EOS = 2


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind]())


# ---- against the plain way ---------------------------------------------------------------------


def plain(tokenizer: Tokenizer, prompt: list[int], ids: list[int], params: SamplingParams) -> Any:
    """Everything decoded again after each token: number of tokens, text, reason, stop reason."""

    def text_of(count: int) -> str:
        whole = tokenizer.decode([*prompt, *ids[:count]], params.skip_special_tokens)
        return whole[len(tokenizer.decode(prompt, params.skip_special_tokens)) :]

    stops, shown, text = StopStrings(params.stop, params.include_stop_str_in_output), 0, ""
    for count, token_id in enumerate(ids, start=1):
        may_stop = count >= params.min_tokens
        ends = may_stop and token_id in (EOS, *params.stop_token_ids)
        if not ends or params.include_stop_str_in_output:
            stable = text_of(count)
            stable = stable[:-1] if stable.endswith("\ufffd") else stable
            for char in stable[shown:]:  # one by one, as no part of it may be skipped
                text += stops.push(char, may_stop)
            shown = max(shown, len(stable))
        last = "stop" if ends else "length" if count == params.max_tokens else None
        why: Any = None if token_id == EOS else token_id
        if not ends and stops.matched is not None:
            return count, text, "stop", stops.matched
        if last is not None:
            rest = text_of(count if not ends or params.include_stop_str_in_output else count - 1)
            text += stops.push(rest[shown:]) + stops.flush()
            if last == "length" and stops.matched is not None:
                return count, text, "stop", stops.matched
            return count, text, last, why if ends else None
    raise AssertionError("it must end")


def live_request(tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> LiveRequest:
    ends = (EOS, *params.stop_token_ids)
    request = Request("a", tuple(prompt), params, params.max_tokens or 0, stop_ids=ends)
    return LiveRequest(request, Sequence(0, request, 0, 0, (0,)), (EOS,), tokenizer)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, list[int], list[int], SamplingParams]:
    kind = draw(st.sampled_from(["byte_level", "byte_level_bos", "wordpiece", "unigram"]))
    any_id = st.integers(0, tokenizer_of(kind).vocab_size + 1)
    text = draw(st.sampled_from(["def fib(n):\n    return n", "日本語、漢字 emoji 😀", "x  y"]))
    ids = [*tokenizer_of(kind).encode(text), *draw(st.lists(any_id, max_size=10))]
    ids = [*ids[draw(st.integers(0, 8)) :], *draw(st.permutations(ids)), 7]
    part = st.integers(0, 8).flatmap(
        lambda i: st.sampled_from([text[i : i + n] for n in (1, 2, 4)])
    )
    stops = draw(st.lists(part | st.just("\ufffd"), max_size=3))
    most = draw(st.integers(1, len(ids)))
    params = SamplingParams(
        stop=[stop for stop in stops if stop],
        include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=draw(st.lists(any_id, max_size=2)),
        max_tokens=most,
        min_tokens=draw(st.integers(0, most)),
        skip_special_tokens=draw(st.booleans()),
    )
    prompt = tokenizer_of(kind).encode("def f(")[: draw(st.integers(1, 3))]
    return kind, prompt, ids, params


@given(case=cases(), data=st.data())
@settings(max_examples=400, deadline=None)
def test_text_and_end_are_those_of_decoding_everything_again(
    case: Any, data: st.DataObject
) -> None:
    kind, prompt, ids, params = case
    tokenizer = tokenizer_of(kind)
    count, text, reason, why = plain(tokenizer, prompt, ids, params)
    deltas = live_request(tokenizer, prompt, dataclasses.replace(params, output_kind=DELTA))
    whole = live_request(tokenizer, prompt, params)
    read: list[RequestOutput] = []
    before = CompletionOutput(0, "", [])
    for number, token_id in enumerate(ids[:count], start=1):
        end = whole.append(0, token_id, None, 1.0)
        assert deltas.append(0, token_id, None, 1.0) == end
        assert end == (reason if number == count else None)
        if data.draw(st.booleans()) or end:
            (now,) = whole.output().outputs
            assert now.text.startswith(before.text)
            assert now.token_ids == ids[:number]
            before = now
            read.append(deltas.output(True))
    (last,) = whole.output().outputs
    assert (len(last.token_ids), last.text, last.finish_reason, last.stop_reason) == (
        count, text, reason, why,
    )  # fmt: skip
    assert "".join(each.outputs[0].text for each in read) == text
    assert [i for each in read for i in each.outputs[0].token_ids] == ids[:count]
    while len(read) > 1:
        read[:2] = [joined(*read[:2])]
    assert read[0].outputs == whole.output().outputs


# ---- kinds -------------------------------------------------------------------------------------


def params_of(**changed: Any) -> SamplingParams:
    values = {"n": 2, "seed": 4, "max_tokens": 14, "logprobs": 1, "prompt_logprobs": 0}
    return SamplingParams(**(values | changed))


def test_deltas_of_a_stream_join_to_what_generate_gives(folder: Path) -> None:
    with make(folder) as llm:
        (right,) = llm.generate([PROMPTS[0]], params_of(), use_tqdm=False)
        outputs = list(llm.stream(PROMPTS[0], params_of(output_kind=DELTA)))
        assert [len(output.outputs[1].token_ids) for output in outputs] == [1] * 14
        assert outputs[1].prompt_logprobs == []
        whole = outputs[0]
        for output in outputs[1:]:
            whole = joined(whole, output)
        assert whole.outputs == right.outputs
        assert whole.prompt_logprobs == right.prompt_logprobs
        assert whole.finished
        for kind in RequestOutputKind:
            params = params_of(output_kind=kind)
            (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
            assert output.outputs == right.outputs
        assert_idle(llm.engine)


# ---- what outputs share ------------------------------------------------------------------------


def test_a_long_prompt_is_not_copied_for_each_token() -> None:
    live = live_request(tokenizer_of("byte_level"), [5] * 1000, SamplingParams(max_tokens=9))
    first = live.output()
    live.append(0, 40, None, 1.0)
    assert live.output().prompt_token_ids is first.prompt_token_ids == [5] * 1000
    first.prompt_token_ids.clear()
    assert live.request.prompt_token_ids == (5,) * 1000


def test_an_output_stays_as_it_was_and_belongs_to_its_consumer() -> None:
    live = live_request(tokenizer_of("byte_level"), [5], SamplingParams(max_tokens=9))
    outputs = []
    for token_id in (40, 41, 42, 43):
        live.append(0, token_id, None, 1.0)
        outputs.append(live.output())
    first, second, third, fourth = (output.outputs[0] for output in outputs)
    assert first.token_ids == [40]  # read late
    assert pickle.loads(pickle.dumps(second)) == second
    assert third == dataclasses.replace(third)
    third.token_ids.clear()
    assert fourth.token_ids == [40, 41, 42, 43]
    assert live.output().outputs[0].token_ids == [40, 41, 42, 43]
    with pytest.raises(AttributeError, match="no attribute 'tokens'"):
        first.tokens  # type: ignore[attr-defined]  # noqa: B018


# ---- a text that fails -------------------------------------------------------------------------


def test_a_text_that_fails_while_it_is_read_ends_its_completion_with_the_next_token(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Completion, may_stop: bool = True) -> None:
        if self.request.prompt_token_ids[0] == 6 and len(self.token_ids) > 3:
            raise RuntimeError("planted")
        write(self, may_stop)

    write = Completion._detokenize
    with make(folder) as llm:
        limit_steps(llm, monkeypatch)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        right = [tokens(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]
        monkeypatch.setattr(Completion, "_detokenize", broken)
        lives = [llm.engine.add(llm.engine.make_request(str(i), None, prompt, params))
                 for i, prompt in enumerate(PROMPTS)]  # fmt: skip
        while llm.engine.has_work:
            llm.engine.step()
            outputs = [live.output() for live in lives]
        assert [reasons(output) for output in outputs] == [{"length"}, {"error"}, *[{"length"}] * 2]
        assert "failed: RuntimeError: planted" in (outputs[1].outputs[0].error or "")
        assert len(outputs[1].outputs[0].token_ids) == 5  # it failed with the fourth
        for number in (0, 2, 3):
            assert tokens(outputs[number]) == right[number]
        assert_idle(llm.engine)


# ---- reports -----------------------------------------------------------------------------------


def test_a_report_is_made_when_it_is_read_and_once() -> None:
    calls = []

    def explain() -> PrefixReport:
        calls.append(1)
        return PrefixReport(cached=4, new=3, partial_block=1)

    report = PrefixReport.when_asked(4, explain)
    assert (report.cached, calls) == (4, [])
    assert report == PrefixReport(cached=4, new=3, partial_block=1)
    assert pickle.loads(pickle.dumps(report)) == report
    assert dataclasses.asdict(report)["partial_block"] == 1
    assert len(calls) == 1
    with pytest.raises(AttributeError, match="no attribute 'old'"):
        report.old  # type: ignore[attr-defined]  # noqa: B018


def test_generate_explains_nothing_that_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from minillm.cache.misses import PrefixHistory

    calls, explain = [], PrefixHistory._explain
    monkeypatch.setattr(
        PrefixHistory, "_explain", lambda *given: calls.append(1) or explain(*given)
    )
    with make(folder, enable_prefix_caching=True) as llm:
        params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        first, second = (llm.generate([PROMPTS[2]], params, use_tqdm=False)[0] for _ in range(2))
        assert calls == []
        # Read after the engine has cached the prompt: the report is of the time before.
        assert first.metrics.prefix is not None
        assert (first.metrics.prefix.cached, first.metrics.prefix.evicted) == (0, 0)
        assert first.metrics.prefix.new == len(PROMPTS[2]) // 4 * 4
        assert second.metrics.num_cached_tokens > 0
        assert len(calls) == 1


# ---- the log -----------------------------------------------------------------------------------


@pytest.fixture
def now(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock of the log."""
    caplog.set_level(logging.INFO, "minillm.serving.stat_logger")
    seconds = [100.0]
    monkeypatch.setattr(stat_logger, "perf_counter", lambda: seconds[0])
    return seconds


def test_a_line_is_logged_when_it_is_time(caplog, folder, now):
    with make(folder) as llm:
        log = stat_logger.StatLogger(llm.engine.scheduler.counters)
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        llm.generate([[9] * 20], params, use_tqdm=False)
        now[0] += 9.9
        log.after_step(llm.engine)
        assert caplog.messages == []
        now[0] += 0.1
        log.after_step(llm.engine)
    (line,) = caplog.messages
    assert line.startswith("0 sequences running, 0 waiting; 2 prompt and 0 new tokens/s; 0.0% of")


def test_drafts_have_a_line_of_their_own_in_the_words_of_vllm(caplog, folder, now):
    """Both lines are about what was done since the line before."""
    with make(folder, **speculating(Truth(folder))) as llm:
        log = stat_logger.StatLogger(llm.engine.scheduler.counters)
        for count in (11, 6):  # 1, then 5 per step; 1, then 5
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            llm.generate([[9] * 20], params, use_tqdm=False)
            now[0] += 10
            log.after_step(llm.engine)
    plain, drafts = caplog.messages[::2], caplog.messages[1::2]
    assert ["1 new tokens/s" in line for line in plain] == [True, False]  # 10 in 10 s, then 5
    assert drafts == [
        "SpecDecoding metrics: Mean acceptance length: 5.00, Accepted throughput: 0.80 tokens/s, "
        "Drafted throughput: 0.80 tokens/s, Accepted: 8 tokens, Drafted: 8 tokens, "
        "Per-position acceptance rate: 1.000, 1.000, 1.000, 1.000, "
        "Avg Draft acceptance rate: 100.0%",
        "SpecDecoding metrics: Mean acceptance length: 5.00, Accepted throughput: 0.40 tokens/s, "
        "Drafted throughput: 0.40 tokens/s, Accepted: 4 tokens, Drafted: 4 tokens, "
        "Per-position acceptance rate: 1.000, 1.000, 1.000, 1.000, "
        "Avg Draft acceptance rate: 100.0%",
    ]
