"""What a failed request leaves in the prefix cache: whatever is right, and nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from tests.engine.small import EOS, assert_idle, make, reasons, tokens, write_model

SYSTEM = list(range(60, 92))  # eight blocks, with which every conversation begins
PLAIN = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
IMPOSSIBLE = SamplingParams(min_tokens=1, allowed_token_ids=[EOS], max_tokens=8)
MARK = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-model"))


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
