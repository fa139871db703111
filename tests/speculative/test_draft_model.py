"""A draft model: it is accepted always where it is the target, and changes no token anywhere.

A draft model that equals its target agrees at every position if, and only if, its cache is right
and its noise is the target's. So acceptance of exactly 1 convicts what no token would show.
"""

import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.models.fixed_sums import FixedDecoder
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.request import Sequence as ScheduledSequence
from minillm.speculative.draft_model import Chunk
from tests.engine.small import assert_idle, make, tokens
from tests.matrix.cells import Cell, check
from tests.models.tiny import Tiny
from tests.pairs import one_in, some
from tests.speculative.drafted import K, assert_all_accepted, draft_of, watch, with_draft

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "seed": 3}
LONG = [(7 * i * i + i) % 251 for i in range(300)]


def params_of(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields)


def run_history(
    engine: Any, choose: random.Random, count: int, longest: int, how: Callable[[int], Any]
) -> None:
    """Requests with common beginnings, some of them aborted, until the engine is idle. `how` has
    the sampling parameters of each, `longest` is one more than its most tokens."""
    for i in range(count):
        start = choose.choice((0, 0, 50, 100))
        prompt = LONG[start : start + choose.randrange(1, 40)]
        given = how(i)  # may choose, too
        params = params_of(choose.randrange(1, longest), **given)
        engine.add(engine.make_request(str(i), None, prompt, params))
        for _ in range(choose.randrange(6)):
            engine.step()
        if choose.random() < 0.2:
            engine.abort(str(choose.randrange(i + 1)))
    while engine.has_work:
        engine.step()
    assert_idle(engine)


def generate(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[list[int]]]:
    given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    return [tokens(output) for output in llm.generate(given, params, use_tqdm=False)]


def record_chunks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[list[Chunk]]:
    """What the draft model computes before it drafts, step by step."""
    draft, passes = draft_of(llm), []
    catch_up = draft._catch_up

    def recorded(chunks: list[Chunk]) -> torch.Tensor:
        passes.append(chunks)
        return catch_up(chunks)

    monkeypatch.setattr(draft, "_catch_up", recorded)
    return passes


# ---- a draft model that equals its target -----------------------------------------------------


@pytest.mark.parametrize(
    ("how", "prefix_cache"), one_in(3, product([GREEDY, SAMPLED], ["hash", "radix"])), ids=str
)
def test_with_prefixes_that_others_computed(folder, monkeypatch, prefix_cache, how):
    """Prefixes that had drafts, that had none, and that end within a block."""
    llm = with_draft(folder, folder, prefix_cache=prefix_cache, num_gpu_blocks_override=100)
    watch(llm, monkeypatch)
    generate(llm, [LONG[:30], LONG[100:130]], [params_of(1), params_of(20, **how)])
    cached = [LONG[:30], LONG[:26], LONG[100:130], LONG[100:127], [*LONG[100:118], 9, 8, 7]]
    generate(llm, cached, params_of(30, **how))
    for _ in range(3):
        generate(llm, cached, params_of(50, **how))
    assert llm.engine.scheduler.counters.num_cached_tokens > 300
    assert_all_accepted(llm, least=500)


def test_with_prompts_in_chunks(folder, monkeypatch):
    """Also its own passes have no more tokens than a step: a long prompt takes it several."""
    llm = with_draft(folder, folder, max_num_batched_tokens=8, max_num_seqs=3)
    watch(llm, monkeypatch)
    passes = record_chunks(llm, monkeypatch)
    generate(llm, [LONG[:50], LONG[60:70], LONG[80:83], LONG[100:160]], params_of(40, **SAMPLED))
    assert max(sum(end - start for _, start, end in chunks) for chunks in passes) == 8
    assert_all_accepted(llm, least=60)


def test_swapped_blocks_are_not_computed_again(folder, monkeypatch):
    """What comes back from the host is as right as it was before."""
    llm = with_draft(folder, folder, num_gpu_blocks_override=40, swap_space=2**-12)
    watch(llm, monkeypatch)
    passes, furthest = record_chunks(llm, monkeypatch), {}
    prompts = [LONG[i * 11 : i * 11 + 6 + i] for i in range(8)]
    generate(llm, prompts, params_of(60))
    assert llm.engine.scheduler.counters.num_preemptions_swap > 3
    for row, start, end in (chunk for chunks in passes for chunk in chunks):
        assert start >= furthest.get(row.new.seq_id, 0)
        furthest[row.new.seq_id] = end


def test_forks_do_not_compute_their_prompt_each(folder, monkeypatch):
    llm = with_draft(folder, folder, num_gpu_blocks_override=120)
    passes = record_chunks(llm, monkeypatch)
    generate(llm, [LONG[:41]], params_of(10, n=3, temperature=1.0, seed=5))
    # Ten whole blocks once, and what each has of its own: two tokens.
    assert [end - start for _, start, end in passes[0]] == [42, 2, 2]
    assert_all_accepted(llm, least=20)


def test_nothing_is_kept_of_requests_that_an_interrupt_ends(folder, monkeypatch):
    """The scheduler begins anew, and so do the marks: prefixes are found no more."""
    llm = with_draft(folder, folder)
    watch(llm, monkeypatch)
    draft, steps = draft_of(llm), []
    logits = draft.model.logits

    def interrupted(hidden):
        steps.append(len(hidden))
        if len(steps) == 20:
            raise KeyboardInterrupt
        return logits(hidden)

    monkeypatch.setattr(draft.model, "logits", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, [LONG[:9], LONG[20:23]], params_of(60))
    assert not draft.shadow._tables
    generate(llm, [LONG[:9], LONG[20:23]], params_of(60))
    assert_all_accepted(llm, least=60)


class Toggled(Drafts):
    """Drafts in some steps."""

    def __init__(self, seed: int):
        super().__init__(K)
        self.random = random.Random(seed)
        self.on = True

    def lengths(self, sequences: Sequence[ScheduledSequence]) -> list[int]:
        """Sometimes none for many steps, sometimes another number for each."""
        if self.random.random() < 0.2:
            self.on = not self.on
        return [self.random.choice((0, 1, 2, K)) if self.on else 0 for _ in sequences]


def test_with_as_many_drafts_as_pay(folder, monkeypatch):
    """How many that are hangs on the clock; that all are right does not."""
    llm = with_draft(folder, folder, "auto")
    llm.engine.scheduler.drafts._due = 0  # tried at once
    watch(llm, monkeypatch)
    params = params_of(60, **SAMPLED)
    found = generate(llm, [LONG[:9], LONG[20:23]], params)
    assert found == generate(make(folder, max_model_len=128), [LONG[:9], LONG[20:23]], params)
    assert_all_accepted(llm, least=0)


@pytest.mark.parametrize(
    "how",
    [SAMPLED, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 1}, GREEDY],
    ids=["sampled", "truncated", "greedy"],
)
def test_with_noise_of_its_own(folder, monkeypatch, how):
    """By the ratio of probabilities, too, equal distributions always accept, whatever was drawn."""
    llm = with_draft(folder, folder, config={"rejection_sample_method": "standard"})
    watch(llm, monkeypatch)
    generate(llm, [LONG[:9], LONG[20:23], LONG[40:60]], params_of(60, **how))
    assert not draft_of(llm).coupled
    counters = llm.engine.scheduler.counters
    # Distributions that differ by rounding accept a draft with a probability just below 1.
    assert counters.num_accepted_tokens >= 0.99 * counters.num_draft_tokens > 100


@pytest.mark.parametrize("mode", ["deterministic", "enforce_eager"])
def test_as_the_target_computes(folder, monkeypatch, mode):
    """Every row by itself, or operation by operation in torch."""
    llm = with_draft(folder, folder, **{mode: True})
    generate(llm, [LONG[:9], LONG[20:23], LONG[40:60]], params_of(40, **SAMPLED))
    draft, runner = draft_of(llm), llm.engine.runner
    assert type(draft.model) is type(runner.model)
    assert draft.shadow.kv.mode == runner.kv.mode
    assert (runner.kv.mode == "fast") == isinstance(runner.model, FixedDecoder)
    assert_all_accepted(llm, least=60)


@pytest.mark.parametrize("family", ["deepseek_v2", "qwen3_moe"])
def test_with_latent_attention_and_with_experts(tmp_path, monkeypatch, family):
    model = Tiny(family, {"num_hidden_layers": 2}).write(tmp_path).folder
    llm = with_draft(model, model, prefix_cache="radix", max_model_len=96)
    watch(llm, monkeypatch)
    prompts = [
        [each % 90 for each in LONG[start:end]] for start, end in ((0, 9), (0, 14), (40, 60))
    ]
    for _ in range(2):
        generate(llm, prompts, params_of(40, **SAMPLED))
    assert_all_accepted(llm, least=120)


@pytest.mark.parametrize("seed", some([0], range(6)))
def test_in_any_history(folder, monkeypatch, seed):
    """Everything at once: a starved pool, prefixes, forks, aborts, drafts in some steps."""
    choose = random.Random(seed)
    llm = with_draft(
        folder,
        folder,
        num_gpu_blocks_override=choose.choice((48, 64)),
        swap_space=choose.choice((0, 2**-13)),
        prefix_cache=choose.choice(("hash", "radix")),
        max_num_batched_tokens=choose.choice((16, 64)),
        max_num_seqs=8,
        async_scheduling=choose.random() < 0.5,
    )
    watch(llm, monkeypatch)
    engine = llm.engine
    engine.scheduler.drafts = Toggled(seed)
    run_history(engine, choose, 30, 50, lambda i: {"n": choose.choice((1, 1, 3)), "seed": i})
    assert_all_accepted(llm, least=100)
    assert set(draft_of(llm).shadow._tables) <= set(engine.scheduler._dropped)


# ---- another draft model changes no token -----------------------------------------------------


def test_tokens_are_those_of_plain_decoding():
    """Of a trained model; other draft models are in `tests/matrix`."""
    llm = check(Cell("embedded"), {"model": "tiny-draft", "num_speculative_tokens": K})
    counters = llm.engine.scheduler.counters
    assert 0.1 < counters.num_accepted_tokens / counters.num_draft_tokens < 0.95


@pytest.mark.parametrize(("length", "context"), one_in(2, product([94, 95, 96], [None, 40, 96])))
def test_up_to_the_end_of_a_context(folder, monkeypatch, length, context):
    """The target's context, and one of the draft model that ends before."""
    prompts = [LONG[:7], LONG[30:71]]
    params = [params_of(length - len(prompt), **SAMPLED) for prompt in prompts]
    plain = generate(make(folder, max_model_len=96), prompts, params)
    llm = with_draft(folder, folder, max_model_len=96, config={"max_model_len": context})
    watch(llm, monkeypatch)
    draft = draft_of(llm)
    forward, positions = draft.model.forward, []

    def recorded(batch, kv):
        positions.append(int(batch.positions.max()))
        return forward(batch, kv)

    monkeypatch.setattr(draft.model, "forward", recorded)
    assert generate(llm, prompts, params) == plain
    assert max(positions) < (context or length) - 1
    assert_all_accepted(llm, least=25)


def test_a_draft_model_that_fails_is_left_out(folder, monkeypatch, caplog):
    llm = with_draft(folder, folder)

    def fail(batch, kv):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(draft_of(llm).model, "forward", fail)
    plain = generate(make(folder, max_model_len=128), [LONG[:7]], params_of(20))
    assert generate(llm, [LONG[:7]], params_of(20)) == plain
    assert [record.message for record in caplog.records if "proposer" in record.message] == [
        "Speculative decoding is off from now on, because its proposer failed: "
        "RuntimeError: no such kernel"
    ]
