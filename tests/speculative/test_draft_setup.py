"""Which draft models are refused, in one sentence, and what an accepted one takes in memory."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM
from minillm.errors import ConfigError
from minillm.models.presets import preset
from minillm.plan.cost import (
    CUBLAS_WORKSPACE,
    activation_peak_bytes,
    block_bytes,
    memory_plan,
    weight_bytes,
)
from tests.engine.small import make
from tests.speculative.drafted import draft_of, with_draft

TARGET, DRAFT = preset("qwen3-8b"), preset("qwen3-0.6b")


@pytest.fixture
def altered(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model in which one JSON file says something else."""

    def alter(file: str, change: Callable[[dict[str, Any]], Any]) -> Path:
        copy = shutil.copytree(folder, tmp_path / "draft")
        data = json.loads((copy / file).read_text())
        change(data)
        (copy / file).write_text(json.dumps(data))
        return copy

    return alter


def refused(message: str, *arguments: Any, **fields: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_draft(*arguments, **fields)
    assert "\n" not in str(error.value)


# ---- pairs that cannot be ---------------------------------------------------------------------


def test_another_vocabulary(folder):
    refused(
        "model 'tiny-draft' has a vocabulary of 4,096 tokens and .* one of 264; choose a draft "
        "model with the same vocabulary",
        folder,
        "tiny-draft",
    )


def test_another_tokenizer(folder, altered):
    def swap(data: dict[str, Any]) -> None:
        vocabulary = data["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]

    draft = altered("tokenizer.json", swap)
    refused("has a tokenizer with other tokens than that of", folder, draft)
    (draft / "tokenizer.json").unlink()
    with_draft(folder, draft)  # token ids are all there is to compare then


def test_a_context_that_is_too_long(folder, altered):
    refused(
        "max_model_len is 100; it must be at most 64, the target's context",
        folder, folder, max_model_len=64, config={"max_model_len": 100},
    )  # fmt: skip
    draft = altered("config.json", lambda data: data.update(max_position_embeddings=32))
    refused(
        "max_model_len is 33; it must be at most 32, the draft model's own context",
        folder, draft, config={"max_model_len": 33},
    )  # fmt: skip
    llm = with_draft(folder, draft)
    assert llm.engine.scheduler.drafts.max_position == 32


def test_a_model_that_cannot_be_loaded(folder, altered):
    refused("model 'tiny-darft' cannot be used: There is .*Did you mean 'tiny-draft'",
            "tiny", "tiny-darft")  # fmt: skip
    draft = altered("config.json", lambda data: data.update(intermediate_size=40))
    refused("cannot be loaded: model.layers.* in model.safetensors has shape", folder, draft)
    (draft / "model.safetensors").unlink()
    refused("cannot be loaded: .* holds no safetensors file", folder, draft)


# ---- memory -----------------------------------------------------------------------------------


def test_the_plan_counts_both_models():
    arguments = {"max_model_len": 4096, "dtype": "bfloat16", "block_size": 32}
    alone = memory_plan(TARGET, 80 * 2**30, **arguments)
    both = memory_plan(TARGET, 80 * 2**30, draft=DRAFT, num_drafts=4, **arguments)
    assert both.draft_weight_bytes == weight_bytes(DRAFT, "bfloat16")
    assert both.weight_bytes == alone.weight_bytes + both.draft_weight_bytes
    assert both.draft_block_bytes == block_bytes(DRAFT, 32, "bfloat16")
    assert both.block_bytes == alone.block_bytes + both.draft_block_bytes
    assert both.kv_bytes_per_token * 32 == both.block_bytes
    parts = both.reserve_bytes + both.weight_bytes + both.activation_bytes + both.kv_cache_bytes
    assert parts == both.memory_bytes
    assert both.num_tokens // 32 == both.kv_cache_bytes // both.block_bytes
    # Logits of 256 sequences with five each, and no more than tokens of a step.
    expected = activation_peak_bytes(TARGET, 2048, 256 * 5, "bfloat16")
    assert both.activation_bytes == expected > alone.activation_bytes
    most = memory_plan(TARGET, 80 * 2**30, draft=DRAFT, num_drafts=15, **arguments)
    assert most.activation_bytes == activation_peak_bytes(TARGET, 2048, 2048, "bfloat16")
    graphs = memory_plan(TARGET, 80 * 2**30, num_drafts=4, cuda_graphs=True, **arguments)
    kept = graphs.graph_bytes - CUBLAS_WORKSPACE
    assert kept == activation_peak_bytes(TARGET, 256 * 5, 0, "bfloat16")


def test_the_activations_are_those_of_the_model_that_has_more():
    wide = replace(DRAFT, intermediate_size=10**6)
    both = memory_plan(TARGET, 80 * 2**30, draft=wide, num_drafts=4)
    assert both.activation_bytes == activation_peak_bytes(wide, 2048, 256, "bfloat16")


def test_a_plan_that_does_not_fit_counts_the_draft_model_in_its_hints():
    arguments = {"max_model_len": 8192, "dtype": "float32", "draft": DRAFT, "num_drafts": 4}
    plan = memory_plan(DRAFT, 7 * 10**9, **arguments)
    assert not plan.fits
    fitting = arguments | {"dtype": "bfloat16"}
    assert 'dtype="bfloat16"' in plan.hints
    assert memory_plan(DRAFT, 7 * 10**9, **fitting).fits
    assert memory_plan(DRAFT, plan.memory_bytes + plan.shortfall_bytes, **arguments).fits
    assert not memory_plan(DRAFT, plan.memory_bytes + plan.shortfall_bytes - 16, **arguments).fits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_allocated_is_what_was_planned(dtype):
    config = {"model": "tiny-draft", "num_speculative_tokens": 4}
    llm = LLM("tiny", dtype=dtype, speculative_config=config, kv_cache_memory_bytes=3_000_000,
              max_model_len=256, swap_space=2**-9)  # fmt: skip
    plan, sizes = llm.plan(), llm.engine.allocated()
    shadow, runner = draft_of(llm).shadow, llm.engine.runner
    assert shadow.kv.num_blocks == runner.kv.num_blocks == 3_000_000 // plan.block_bytes
    assert shadow.kv.block_size == runner.kv.block_size == plan.settings.block_size
    assert shadow.host.num_blocks == runner.host.num_blocks == 2**21 // plan.block_bytes
    assert sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.draft_block_bytes
    assert sizes["kv_cache"] + sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.block_bytes
    swapped = sizes["swap_space"] + sizes["draft_swap_space"]
    assert swapped == runner.host.num_blocks * plan.block_bytes <= 2**21
    assert sizes["draft_weights"] == pytest.approx(plan.draft_weight_bytes, rel=0.05)
    weights = sizes["weights"] + sizes["draft_weights"]
    assert weights == pytest.approx(plan.weight_bytes, rel=0.05)


def test_what_does_not_fit_says_that_there_is_a_draft_model(folder):
    least = 32  # blocks of 4 for one sequence of 128
    alone = make(folder, max_model_len=128).plan()
    refused("num_gpu_blocks_override is 31; it must be at least 32", folder, folder,
            num_gpu_blocks_override=least - 1)  # fmt: skip
    with pytest.raises(ConfigError, match=r"because .* with its draft model also needs") as error:
        with_draft(folder, folder, num_gpu_blocks_override=10**12)
    most = int(str(error.value).partition("at most ")[2].partition(", because")[0].replace(",", ""))
    assert most == pytest.approx(alone.memory_bytes * 0.9 / alone.block_bytes / 2, rel=0.3)


def test_a_cache_that_is_given_in_blocks_has_so_many_in_both(folder):
    llm = with_draft(folder, folder, num_gpu_blocks_override=50)
    assert draft_of(llm).shadow.kv.num_blocks == llm.engine.runner.kv.num_blocks == 50
    alone = make(folder, max_model_len=128, num_gpu_blocks_override=50)
    assert llm.plan().kv_cache_bytes == 2 * alone.plan().kv_cache_bytes
    assert "draft_kv_cache" not in alone.engine.allocated()
