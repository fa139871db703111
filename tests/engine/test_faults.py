"""Something breaks in the middle of a step: one request fails, or the engine says why it stopped.

Every fault is injected into a run of six requests whose tokens without the fault are known. The KV
cache is filled with NaN before, so that reading a slot that was never written cannot go unnoticed.
Of faults, settings and a third axis those run here in which any two meet; the others are slow.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.api.outputs import RequestOutput, ScoreOutput
from minillm.engine import completion, live_request
from minillm.errors import EngineDeadError, Failure, InvalidRequestError
from minillm.execution import collect, runner
from minillm.execution.runner import Runner, SequenceRow
from minillm.sampling.sampler import Sampler
from minillm.scheduling import scheduler
from minillm.scheduling.scheduler import Scheduler
from minillm.text.detokenizer import IncrementalDetokenizer
from tests.engine.small import assert_idle, limit_steps, make, reasons, tokens
from tests.pairs import pairwise

MARK = 200  # the token of the request that goes wrong; nobody else has it
VICTIM = 2
PROMPTS = [
    list(range(60, 77)),
    list(range(60, 70)),
    [*range(60, 72), MARK, *range(80, 86)],
    [90, 91, 92],
    [*range(60, 72), 99, 98, 97, 96, 95],
    list(range(100, 122)),
]
PLAIN = SamplingParams(
    temperature=0.7, seed=5, max_tokens=9, ignore_eos=True, logit_bias={MARK: -100.0}
)
LONG = SamplingParams(temperature=0.7, seed=5, max_tokens=40, ignore_eos=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 7},
    "no prefix cache": {"enable_prefix_caching": False},
    "radix": {"prefix_cache": "radix", "max_num_batched_tokens": 9, "max_num_seqs": 9},
    "recompute": {"num_gpu_blocks_override": 17},
    "swap": {"num_gpu_blocks_override": 17, "swap_space": 0.001},
    "ahead": {"async_scheduling": True},
    "ahead, recompute": {"async_scheduling": True, "num_gpu_blocks_override": 17},
}


AT_ONCE = [name for name in SETTINGS if "ahead" not in name]  # tokens are there after each step


class Planted(RuntimeError):
    """The fault."""


ERRORS = [Planted("planted"), MemoryError(), torch.OutOfMemoryError("CUDA out of memory")]


def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> LLM:
    llm = make(folder, **{"max_model_len": 48, **arguments})
    limit_steps(llm, monkeypatch)
    for cache in (llm.engine.runner.kv, llm.engine.runner.host):
        if cache is not None:
            cache.key.fill_(math.nan)
            cache.value.fill_(math.nan)
    return llm


def all_params(n: int = 1, **arguments: Any) -> list[SamplingParams]:
    """Everybody's parameters; the victim has `n` completions and whatever else is given."""
    fields = {"temperature": 0.7, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    fields |= {"logit_bias": {MARK: -100.0}, "n": n}
    params = [PLAIN] * len(PROMPTS)
    params[VICTIM] = SamplingParams(**(fields | arguments))
    return params


@pytest.fixture(scope="module")
def expected(folder: Path) -> Callable[[list[SamplingParams]], list[list[list[int]]]]:
    """Tokens without a fault, one request after the other, without a prefix cache."""
    plain, known = make(folder, enable_prefix_caching=False), {}

    def run(params: list[SamplingParams]) -> list[list[list[int]]]:
        key = repr(params)
        if key not in known:
            known[key] = [
                tokens(plain.generate([prompt], each, use_tqdm=False)[0])
                for prompt, each in zip(PROMPTS, params, strict=True)
            ]
        return known[key]

    return run


def is_marked(prompt: object) -> bool:
    return MARK in prompt  # type: ignore[operator]


def wrap(
    patch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    breaks: Callable[..., bool],
    error: BaseException,
) -> None:
    """Make `owner.name` raise whenever `breaks` says so about its arguments."""
    works = getattr(owner, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if breaks(*args, **kwargs):
            raise error
        return works(*args, **kwargs)

    patch.setattr(owner, name, broken)


def always(*args: Any, **kwargs: Any) -> bool:
    return True


def call_number(wanted: int) -> Callable[..., bool]:
    """True once: at this call, counted from 1."""
    calls = [0]

    def breaks(*args: Any, **kwargs: Any) -> bool:
        calls[0] += 1
        return calls[0] == wanted

    return breaks


def break_call(
    patch: pytest.MonkeyPatch, target: tuple[Any, ...], call: int, error: BaseException
) -> None:
    """Make the n-th call of any of these functions of an object raise."""
    owner, *names = target
    breaks = call_number(call)
    for name in names:
        wrap(patch, owner, name, breaks, error)


# ---- what goes wrong for one request -----------------------------------------------------------


def state_of(llm: LLM, row: Any) -> SequenceRow:
    return llm.engine.runner._rows[row.seq_id]


def of_victim(llm: LLM, row: Any) -> bool:
    return marked_state(state_of(llm, row))


def marked_state(state: SequenceRow) -> bool:
    return is_marked(state.new.token_ids[: state.new.num_prompt_tokens])


def states_of(llm: LLM, places: Sequence[int]) -> list[SequenceRow]:
    """The sequences in these persistent rows."""
    known = {state.row: state for state in llm.engine.runner._rows.values()}
    return [known[place] for place in places]


def num_outputs(state: SequenceRow) -> int:
    return len(state.token_ids) - state.new.num_prompt_tokens


def in_batch(llm: LLM, patch: pytest.MonkeyPatch, error: Exception) -> None:
    wrap(
        patch, llm.engine.runner, "batch", lambda rows: any(of_victim(llm, r) for r in rows), error
    )


def in_decode(llm: LLM, patch: pytest.MonkeyPatch, error: Exception) -> None:
    """Not before the fourth new token."""

    def late(rows: Any) -> bool:
        return any(of_victim(llm, r) and num_outputs(state_of(llm, r)) > 3 for r in rows)

    wrap(patch, llm.engine.runner, "batch", late, error)


def in_a_layer(llm: LLM, patch: pytest.MonkeyPatch, error: Exception) -> None:
    def marked(x: Any, residual: Any, rope: Any, batch: Any, kv: Any) -> bool:
        return bool((batch.input_ids == MARK).any())

    wrap(patch, llm.engine.runner.model.layers[1], "forward", marked, error)


def in_sampling(llm: LLM, patch: pytest.MonkeyPatch, error: Exception) -> None:
    def marked(logits: Any, places: Any, *options: Any) -> bool:
        return any(map(marked_state, states_of(llm, places)))

    wrap(patch, llm.engine.runner.sampler, "choose", marked, error)


def in_text(method: str) -> Callable[[LLM, pytest.MonkeyPatch, Exception], None]:
    """`method` of the victim's detokeniser."""

    def inject(llm: LLM, patch: pytest.MonkeyPatch, error: Exception) -> None:
        class Broken(IncrementalDetokenizer):
            ready = False

            def __init__(self, tokenizer: Any, prompt: Any, skip: bool):
                self.marked = is_marked(prompt)
                self.check("__init__")
                super().__init__(tokenizer, prompt, skip)
                self.ready = True

            def check(self, name: str) -> None:
                if self.marked and name == method and (self.ready or name == "__init__"):
                    raise error

            def push(self, token_id: int) -> str:
                self.check("push")
                return super().push(token_id)

            def flush(self) -> str:
                self.check("flush")
                return super().flush()

        patch.setattr(completion, "IncrementalDetokenizer", Broken)

    return inject


ONE_FAILS = {
    "batch": in_batch,
    "batch while decoding": in_decode,
    "layer": in_a_layer,
    "sampler": in_sampling,
    "text begins": in_text("__init__"),
    "text goes on": in_text("push"),
    "text ends": in_text("flush"),
}


def assert_only_the_victim_failed(
    outputs: list[RequestOutput], right: list[list[list[int]]], sentence: str
) -> None:
    for index, output in enumerate(outputs):
        assert output.finished
        if index != VICTIM:
            assert reasons(output) == {"length"}
            assert tokens(output) == right[index], f"request {index} has other tokens"
    failed = outputs[VICTIM]
    assert reasons(failed) == {"error"}
    for have, whole in zip(failed.outputs, right[VICTIM], strict=True):
        assert sentence in have.error
        assert "\n" not in have.error
        assert list(have.token_ids) == whole[: len(have.token_ids)]


@pytest.mark.parametrize(("fault", "setting", "n"), pairwise([*ONE_FAILS], [*SETTINGS], [1, 3]))
def test_one_request_fails_and_the_others_do_not_notice(
    folder, expected, monkeypatch, fault, setting, n
):
    llm, params = engine(folder, monkeypatch, **SETTINGS[setting]), all_params(n)
    right = expected(params)
    with monkeypatch.context() as patch:
        ONE_FAILS[fault](llm, patch, Planted("planted here"))
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert_only_the_victim_failed(outputs, right, "Planted: planted here")
        assert_idle(llm.engine)
    # Nothing of what was not computed may be found in the prefix cache.
    for again in (PROMPTS[VICTIM : VICTIM + 1], PROMPTS):
        some = params[VICTIM : VICTIM + 1] if len(again) == 1 else params
        wanted = right[VICTIM : VICTIM + 1] if len(again) == 1 else right
        assert list(map(tokens, llm.generate(again, some, use_tqdm=False))) == wanted
        assert_idle(llm.engine)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("fault", ["layer", "sampler"])
def test_every_kind_of_error_is_named(folder, expected, monkeypatch, fault, error):
    llm, params = engine(folder, monkeypatch), all_params()
    ONE_FAILS[fault](llm, monkeypatch, error)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert_only_the_victim_failed(outputs, expected(params), type(error).__name__)
    assert_idle(llm.engine)


@pytest.mark.parametrize("setting", ["recompute", "swap", "ahead, recompute"])
def test_the_settings_do_what_their_names_say(folder, monkeypatch, setting):
    llm = engine(folder, monkeypatch, **SETTINGS[setting])
    llm.generate(PROMPTS, all_params(3), use_tqdm=False)
    counters = llm.engine.scheduler.counters
    assert bool(counters.num_preemptions_swap) == (setting == "swap")
    assert bool(counters.num_preemptions_recompute) == ("recompute" in setting)


@pytest.mark.parametrize("place", ["batch", "layer", "sampler"])
def test_when_it_fails_for_all_all_fail_and_the_next_ones_do_not(
    folder, expected, monkeypatch, place
):
    llm, params = engine(folder, monkeypatch), all_params(3)
    owner, name = {
        "batch": (llm.engine.runner, "batch"),
        "layer": (llm.engine.runner.model.layers[0], "forward"),
        "sampler": (llm.engine.runner.sampler, "choose"),
    }[place]
    with monkeypatch.context() as patch:
        wrap(patch, owner, name, always, Planted("planted"))
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            assert reasons(output) == {"error"}
            assert "Planted: planted" in output.outputs[0].error
        assert_idle(llm.engine)
    assert list(map(tokens, llm.generate(PROMPTS, params, use_tqdm=False))) == expected(params)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("place", ["layer", "sampler"])
def test_what_only_fails_for_several_rows_fails_for_nobody(
    folder, expected, monkeypatch, place, setting
):
    llm, params = engine(folder, monkeypatch, **SETTINGS[setting]), all_params()
    if place == "layer":
        layer = llm.engine.runner.model.layers[1]
        several: Callable[..., bool] = lambda x, r, rope, batch, kv: len(batch.seq_lens) > 1  # noqa: E731
        wrap(monkeypatch, layer, "forward", several, Planted("too many"))
    else:
        sampler = llm.engine.runner.sampler
        several = lambda x, rows, *_: len(rows) > 1  # noqa: E731
        wrap(monkeypatch, sampler, "choose", several, Planted("too many"))
    assert list(map(tokens, llm.generate(PROMPTS, params, use_tqdm=False))) == expected(params)
    assert_idle(llm.engine)


@pytest.mark.parametrize(("setting", "index", "step"), pairwise([*AT_ONCE], [0, 1, 2], [1, 4]))
def test_one_of_three_samples_fails(folder, expected, monkeypatch, setting, index, step):
    llm, params = engine(folder, monkeypatch, **SETTINGS[setting]), all_params(3)
    right = expected(params)
    works = llm.engine.runner.sampler.choose

    def choose(logits: Any, places: Any, positions: Any, forks: Any, *rest: Any) -> Any:
        tokens, best = works(logits, places, positions, forks, *rest)
        end = 0
        for state, count in zip(states_of(llm, places), forks, strict=True):
            start, end = end, end + 1 + count
            place = start + index - state.new.sample_index
            late = num_outputs(state) == step - 1
            if marked_state(state) and late and start <= place < end:
                best[place] = math.nan
        return tokens, best

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner.sampler, "choose", choose)
        patch.setattr(
            collect,
            "failure_of",
            lambda value: Failure("Planted.", "model") if value != value else None,
        )
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    for number, output in enumerate(outputs):
        for each in output.outputs:
            whole = right[number][each.index]
            if (number, each.index) == (VICTIM, index):
                assert (each.finish_reason, each.error) == ("error", "Planted.")
                assert each.token_ids == whole[: step - 1]
            else:
                assert (each.finish_reason, each.token_ids) == ("length", whole)
    assert_idle(llm.engine)
    assert list(map(tokens, llm.generate(PROMPTS, params, use_tqdm=False))) == right


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_completion_that_fails_after_its_preemption_ends_alone(folder, monkeypatch, chunk, index):
    """In a chunk without a sample too, where it stands for nobody but itself."""
    prompts, params = [PROMPTS[3], PROMPTS[VICTIM]], [LONG, all_params(3, max_tokens=24)[VICTIM]]
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": 7, "num_gpu_blocks_override": 16}
    llm, plain = engine(folder, monkeypatch, **limits), make(folder)
    right = list(map(tokens, plain.generate(prompts, params, use_tqdm=False)))
    hits = []

    def recomputed(rows: Any) -> bool:
        for row in rows:
            new = state_of(llm, row).new
            resumed = len(new.token_ids) > new.num_prompt_tokens + 1
            if of_victim(llm, row) and resumed and new.sample_index == index:
                hits.append(row.num_samples)
                return True
        return False

    wrap(monkeypatch, llm.engine.runner, "batch", recomputed, Planted("planted"))
    other, victim = llm.generate(prompts, params, use_tqdm=False)
    assert (reasons(other), tokens(other)) == ({"length"}, right[0])
    for each in victim.outputs:
        whole = right[1][each.index]
        assert each.finish_reason == ("error" if each.index == index else "length")
        assert each.token_ids == (whole[: len(each.token_ids)] if each.index == index else whole)
    assert set(hits) == {0 if chunk == 7 else 1}, "another step failed than was to fail"
    assert_idle(llm.engine)


# ---- NaN ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("which", ["one", "all"])
def test_nan_fails_whose_logits_it_is_in(folder, expected, monkeypatch, which, setting):
    llm, params = engine(folder, monkeypatch, **SETTINGS[setting]), all_params(3)
    right, layer = expected(params), llm.engine.runner.model.layers[0]
    works = layer.forward

    def forward(x: Any, residual: Any, rope: Any, batch: Any, kv: Any) -> Any:
        x, residual = works(x, residual, rope, batch, kv)
        wrong = batch.input_ids == MARK if which == "one" else batch.input_ids >= 0
        return torch.where(wrong[:, None], math.nan, x), residual

    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", forward)
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        if which == "one":
            assert_only_the_victim_failed(outputs, right, "NaN")
        else:
            assert all(reasons(output) == {"error"} for output in outputs)
        assert_idle(llm.engine)
    # A cosmic ray, not a bad model: what it left in the cache must not outlive it.
    for _ in range(2):
        assert list(map(tokens, llm.generate(PROMPTS, params, use_tqdm=False))) == right
        assert_idle(llm.engine)


# ---- prompt log-probabilities and scores ---------------------------------------------------------


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("place", ["layer", "logits", "text"])
def test_prompt_logprobs_that_fail_fail_their_request(folder, expected, monkeypatch, place, chunk):
    llm = engine(folder, monkeypatch, max_num_batched_tokens=chunk, max_num_seqs=7)
    params = all_params(prompt_logprobs=2)
    right = expected(params)
    with monkeypatch.context() as patch:
        if place == "layer":
            in_a_layer(llm, patch, Planted("planted"))
        elif place == "logits":
            wrap(patch, runner, "token_logprobs", always, Planted("planted"))
        else:
            wrap(
                patch, live_request, "with_text", lambda entry, t: MARK in entry, Planted("planted")
            )
        outputs = llm.generate(PROMPTS, params, use_tqdm=False)
        assert_only_the_victim_failed(outputs, right, "Planted: planted")
        assert_idle(llm.engine)
    output = llm.generate(PROMPTS, params, use_tqdm=False)[VICTIM]
    assert tokens(output) == right[VICTIM]
    assert len(output.prompt_logprobs) == len(PROMPTS[VICTIM])


def assert_close(scores: list[ScoreOutput], right: list[ScoreOutput]) -> None:
    for have, want in zip(scores, right, strict=True):
        assert have.num_tokens == want.num_tokens
        assert have.log_likelihood == pytest.approx(want.log_likelihood, rel=1e-5)


@pytest.mark.parametrize("chunk", [7, 64])
def test_a_text_that_cannot_be_scored_is_refused_and_others_still_score(folder, monkeypatch, chunk):
    llm = engine(folder, monkeypatch, max_num_batched_tokens=chunk, max_num_seqs=7)
    texts = ["a text of several chunks", "another text that is long", "short"]
    scores = llm.score(texts)
    code = llm.tokenizer.encode("v")[0]  # in no other word
    for text in texts:
        assert code not in llm.tokenizer.encode(text) or text == texts[0]

    def marked(x: Any, residual: Any, rope: Any, batch: Any, kv: Any) -> bool:
        return bool((batch.input_ids == code).any())

    with monkeypatch.context() as patch:
        wrap(patch, llm.engine.runner.model.layers[1], "forward", marked, Planted("planted"))
        with pytest.raises(InvalidRequestError, match="Planted: planted"):
            llm.score(texts)
        assert_idle(llm.engine)
        assert_close(llm.score(texts[1:]), scores[1:])
    assert_close(llm.score(texts), scores)
    assert_idle(llm.engine)


# ---- what nobody can be blamed for --------------------------------------------------------------

ENGINE_DIES = {
    "a row is made": (SequenceRow, "__init__"),
    "rows are updated": (Runner, "_update_rows"),
    "blocks are moved": (Runner, "_move_blocks"),
    "schedule": (Scheduler, "schedule", "schedule_ahead"),
    "commit": (Scheduler, "commit"),
    "forks": (Scheduler, "_fork"),
}


@pytest.mark.parametrize(
    ("setting", "place", "call"), pairwise(["chunks", "swap", "ahead"], [*ENGINE_DIES], [1, 4])
)
def test_the_engine_stops_with_one_clear_error(folder, monkeypatch, setting, place, call):
    llm = engine(folder, monkeypatch, **SETTINGS[setting])
    paused = llm.stream(PROMPTS[3], LONG)
    next(paused)
    fault = Planted("planted\nhere")
    params = [all_params(3)[VICTIM], *all_params(3)[1:]]
    with monkeypatch.context() as patch:
        break_call(patch, ENGINE_DIES[place], call, fault)
        with pytest.raises(EngineDeadError, match="stopped: Planted: planted here") as caught:
            llm.generate(PROMPTS, params, use_tqdm=False)
    assert caught.value.__cause__ is fault
    (last,) = paused
    assert (reasons(last), last.outputs[0].error) == ({"error"}, str(caught.value))
    assert not llm.engine.has_work
    for use in (
        lambda: llm.generate(PROMPTS, PLAIN, use_tqdm=False),
        lambda: llm.generate([], PLAIN),
        lambda: list(llm.stream(PROMPTS[0], PLAIN)),
        lambda: llm.score("a text"),
        lambda: llm.engine.step(),
    ):
        with pytest.raises(EngineDeadError) as again:
            use()
        assert str(again.value) == str(caught.value)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="planted"):
        llm.generate(PROMPTS[0], PLAIN)


# ---- Ctrl-C --------------------------------------------------------------------------------------

INTERRUPTED = ENGINE_DIES | {
    "batch": (Runner, "batch"),
    "layer": None,
    "sampler": (Sampler, "choose"),
    "text begins": (IncrementalDetokenizer, "__init__"),
    "text goes on": (IncrementalDetokenizer, "push"),
    "a completion grows": (completion.Completion, "append"),
    "prompt logprobs": (runner, "token_logprobs"),
    "a request is added": (Scheduler, "add"),
    "completions are made": (completion.Completion, "__init__"),
}


BEFORE_THE_STEP = ("a request is added", "completions are made")


@pytest.mark.parametrize(
    ("setting", "place", "call"),
    pairwise(["chunks", "swap", "ahead", "ahead, recompute"], [*INTERRUPTED], [1, 2]),
)
def test_after_ctrl_c_the_engine_serves_again(folder, expected, monkeypatch, setting, place, call):
    llm = engine(folder, monkeypatch, **SETTINGS[setting])
    params = all_params(3, prompt_logprobs=1)
    params[0] = params[VICTIM]
    target = INTERRUPTED[place] or (llm.engine.runner.model.layers[1], "forward")
    paused = llm.stream(PROMPTS[3], LONG)
    next(paused)
    with monkeypatch.context() as patch:
        break_call(patch, target, call, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, params, use_tqdm=False)
        *_, last = paused
        assert reasons(last) == ({"length"} if place in BEFORE_THE_STEP else {"abort"})
        assert_idle(llm.engine)
    assert list(map(tokens, llm.generate(PROMPTS, params, use_tqdm=False))) == expected(params)
    assert_idle(llm.engine)


@pytest.mark.parametrize("booked", [False, True])  # in no line, or whole
def test_ctrl_c_while_a_request_is_added_leaves_nothing_of_it(
    folder, expected, monkeypatch, booked
):
    llm, add = engine(folder, monkeypatch), Scheduler.add

    def interrupted(*args):
        if booked:
            add(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        owner, name = (Scheduler, "add") if booked else (scheduler, "insert")
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    assert_idle(llm.engine)
    outputs = llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    assert list(map(tokens, outputs)) == expected(all_params())


def test_ctrl_c_again_and_again_costs_no_row(folder, expected, monkeypatch):
    llm = engine(folder, monkeypatch, max_num_seqs=2)
    for _ in range(5):
        with monkeypatch.context() as patch:
            wrap(patch, SequenceRow, "__init__", always, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, PLAIN, use_tqdm=False)
        assert_idle(llm.engine)
    outputs = llm.generate(PROMPTS, PLAIN, use_tqdm=False)
    assert list(map(tokens, outputs)) == expected(all_params())


def test_an_interrupted_text_that_cannot_be_ended_is_given_up(folder, monkeypatch):
    llm = engine(folder, monkeypatch)
    stream = llm.stream(PROMPTS[VICTIM], all_params(stop="zz")[VICTIM])
    with monkeypatch.context() as patch:
        in_text("flush")(llm, patch, Planted("planted"))
        next(stream)
        stream.close()
        assert_idle(llm.engine)
        live = llm.engine.add(
            llm.engine.make_request("x", None, PROMPTS[VICTIM], all_params()[VICTIM])
        )
        llm.engine.step()
        llm.engine.abort("x")
    assert live.output().outputs[0].finish_reason == "error"
    assert_idle(llm.engine)
