"""What a failed request leaves in the prefix cache: whatever is right, and nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from tests.engine.small import EOS, assert_idle, make, reasons, tokens

SYSTEM = list(range(60, 92))  # eight blocks, with which every conversation begins
PLAIN = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
IMPOSSIBLE = SamplingParams(min_tokens=1, allowed_token_ids=[EOS], max_tokens=8)
MARK = 200


def conversations(llm: LLM) -> list[list[int]]:
    """Ten of them have run, one after the other."""
    prompts = [[*SYSTEM, *range(i, i + 9)] for i in range(10, 110, 10)]
    for prompt in prompts:
        llm.generate([prompt], PLAIN, use_tqdm=False)
    return prompts


def cached(llm: LLM, prompt: list[int]) -> int:
    blocks = llm.engine.scheduler.blocks
    return blocks.match([*prompt, 0], len(prompt), "").num_tokens // 4 * 4


def poison_logits(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a request with `MARK` in its prompt get NaN."""
    model = llm.engine.runner.model
    forward, logits, marked = model.forward, model.logits, [False]

    def noticing(batch: Any, kv: Any) -> Any:
        marked[0] = bool((batch.input_ids == MARK).any())
        return forward(batch, kv)

    def poisoned(hidden: Any) -> Any:
        wrong = logits(hidden)
        return torch.full_like(wrong, math.nan) if marked[0] else wrong

    monkeypatch.setattr(model, "forward", noticing)
    monkeypatch.setattr(model, "logits", poisoned)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_an_impossible_mask_costs_no_other_request_its_prefix(folder, prefix_cache):
    """Its keys and values are right: only its own mask leaves no token."""
    llm = make(folder, prefix_cache=prefix_cache, num_gpu_blocks_override=128)
    prompts = conversations(llm)
    findable = len(llm.engine.scheduler.blocks.index)
    (output,) = llm.generate([[*SYSTEM, 1, 2, 3, 4, 5]], IMPOSSIBLE, use_tqdm=False)
    assert reasons(output) == {"error"}
    assert "No token is left" in output.outputs[0].error
    assert len(llm.engine.scheduler.blocks.index) >= findable
    assert [cached(llm, prompt) for prompt in prompts] == [40] * 10
    assert_idle(llm.engine)


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
def test_after_nan_only_blocks_that_the_request_computed_are_forgotten(
    folder, prefix_cache, monkeypatch
):
    llm = make(folder, prefix_cache=prefix_cache, num_gpu_blocks_override=128)
    prompts = conversations(llm)
    prompt = [*SYSTEM, 1, 2, 3, 4, MARK, 6, 7, 8, 9]
    expected = tokens(make(folder).generate([prompt], PLAIN, use_tqdm=False)[0])
    with monkeypatch.context() as patch:
        poison_logits(llm, patch)
        (output,) = llm.generate([prompt], PLAIN, use_tqdm=False)
    assert reasons(output) == {"error"}
    assert "NaN" in output.outputs[0].error
    assert cached(llm, prompt) == len(SYSTEM)
    assert [cached(llm, prompt) for prompt in prompts] == [40] * 10
    assert tokens(llm.generate([prompt], PLAIN, use_tqdm=False)[0]) == expected
    assert_idle(llm.engine)


def test_a_prompt_in_chunks_takes_all_that_it_computed_out_of_the_cache(folder, monkeypatch):
    """Where the first bad value stood is not known, so no block of its own is trusted."""
    llm = make(folder, max_num_batched_tokens=8, max_num_seqs=4)
    prompt = [*SYSTEM, 1, 2, 3, MARK]
    with monkeypatch.context() as patch:
        poison_logits(llm, patch)
        (output,) = llm.generate([prompt], PLAIN, use_tqdm=False)
    assert reasons(output) == {"error"}
    assert cached(llm, prompt) == 0
    assert_idle(llm.engine)


# ---- rows that are read in their own step --------------------------------------------------------

SETTINGS: dict[str, dict[str, Any]] = {
    "hash": {"prefix_cache": "hash"},
    "radix": {"prefix_cache": "radix"},
    "overlap": {"async_scheduling": True},
    "deterministic": {"deterministic": True},
    "chunks": {"max_num_batched_tokens": 32},
    "chunks, overlap": {"max_num_batched_tokens": 32, "async_scheduling": True},
}
TWENTY = [[*SYSTEM, i, i + 1, i + 2] for i in range(19)] + [[*SYSTEM, 7]]  # one with a row of 1
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[list[int]]]:
    """The tokens of each of the twenty, without a cache."""
    llm = make(folder, enable_prefix_caching=False)
    return [tokens(llm.generate([prompt], SAMPLED, use_tqdm=False)[0]) for prompt in TWENTY]


def shared_engine(folder: Path, **setting: Any) -> LLM:
    llm = make(folder, num_gpu_blocks_override=300, max_num_seqs=32, **setting)
    for tensor in (llm.engine.runner.kv.key, llm.engine.runner.kv.value):
        tensor.fill_(math.nan)  # what was never written
    return llm


@pytest.mark.parametrize("setting", SETTINGS)
def test_twenty_prompts_with_one_beginning_compute_it_once(folder, alone, setting):
    llm = shared_engine(folder, **SETTINGS[setting])
    outputs = llm.generate(TWENTY, SAMPLED, use_tqdm=False)
    assert [tokens(output) for output in outputs] == alone
    counters = llm.engine.scheduler.counters
    own = sum(len(prompt) - len(SYSTEM) for prompt in TWENTY)
    assert counters.num_cached_tokens == 19 * len(SYSTEM)
    assert counters.num_prefill_tokens == len(SYSTEM) + own
    cached = [output.metrics.num_cached_tokens for output in outputs]
    assert cached == [0, *[len(SYSTEM)] * 19]
    if "chunks" not in setting:
        assert len(llm.trace[0].rows) == 20
    assert_idle(llm.engine)


def break_first(llm: LLM, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The first request, the only one to compute the common beginning, goes wrong: its row raises
    in every pass, or its logits are NaN; with NaN its keys and values are NaN, too."""
    model = llm.engine.runner.model
    layer = getattr(model, "model", model).layers[0]
    works = layer.forward

    def starts(batch: Any) -> bool:
        return bool((batch.input_ids == SYSTEM[-1]).any())

    def wrong(x: Any, residual: Any, rope: Any, batch: Any, kv: Any) -> Any:
        if starts(batch) and how == "raises":
            raise RuntimeError("planted")
        if starts(batch):
            place = (batch.input_ids == SYSTEM[-1]).nonzero()[0]
            x = x.index_fill(0, place, math.nan)
        return works(x, residual, rope, batch, kv)

    monkeypatch.setattr(layer, "forward", wrong)


# A chunk in the middle of a prompt has no logits, so that NaN is noticed at the end of the prompt.
FAILURES = [
    (setting, how) for setting in SETTINGS for how in ("raises", "NaN")
    if how == "raises" or "chunks" not in setting
]  # fmt: skip


@pytest.mark.parametrize(("setting", "how"), FAILURES)
def test_when_the_writer_fails_its_readers_are_computed_again(
    folder, alone, monkeypatch, setting, how
):
    """Each in turn: the first fails, then the first of those that are left, and so on."""
    llm = shared_engine(folder, **SETTINGS[setting])
    with monkeypatch.context() as patch:
        break_first(llm, patch, how)
        left = [4]
        step = llm.engine.step

        def counted() -> Any:
            left[0] -= 1
            if not left[0]:
                patch.undo()  # from now on nothing fails
            return step()

        patch.setattr(llm.engine, "step", counted)
        outputs = llm.generate(TWENTY, SAMPLED, use_tqdm=False)
    failed = [index for index, output in enumerate(outputs) if reasons(output) == {"error"}]
    assert 0 < len(failed) < 5
    for index, output in enumerate(outputs):
        assert index in failed or tokens(output) == alone[index], index
    assert [tokens(one) for one in llm.generate(TWENTY, SAMPLED, use_tqdm=False)] == alone
    assert any(record.void for record in llm.trace) or "chunks" in setting
    assert_idle(llm.engine)
