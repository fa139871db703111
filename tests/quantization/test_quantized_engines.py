"""Engines with quantised weights: several ranks, and everything an engine does to a batch."""

from pathlib import Path

import pytest

from minillm import LLM, SamplingParams
from tests.quantization.test_golden import GOLDEN

PROMPTS = [[3, 17, 4, 31, 0, 9, 22, 5], [3, 17, 4, 31, 7], [12, 28, 1, 6, 30, 2, 2, 9, 8, 4, 19]]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
FOLDERS = ["gptq-sym", "gptq-8bit", "nf4-double", "llm-int8", "pack-asym", "fp8-block"]
CHANGES = {
    "prefix cache": {"enable_prefix_caching": True},
    "chunked prefill": {"max_num_batched_tokens": 4, "enable_prefix_caching": False},
    "preemption": {"num_gpu_blocks_override": 5},
    "speculation": {"speculative_config": NGRAM},
}


def tokens(folder: Path, **options: object) -> list[list[int]]:
    """What an engine in float32 generates, twice with one cache."""
    usual = {"dtype": "float32", "block_size": 8, "max_model_len": 32, "max_num_seqs": 4}
    llm = LLM(str(folder), **(usual | options))
    try:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        found = [llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2)]
        return [each.outputs[0].token_ids for outputs in found for each in outputs]
    finally:
        llm.close()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["gptq-sym", "nf4-double", "fp8-block"])
def test_settings_do_not_change_tokens(name, change):
    folder = GOLDEN / name
    assert tokens(folder, **CHANGES[change]) == tokens(folder, enable_prefix_caching=False)


@pytest.mark.parametrize("change", CHANGES)
def test_deterministic_mode_with_int8_weights(change):
    folder = GOLDEN / "llm-int8"
    alone = tokens(folder, deterministic=True, enable_prefix_caching=False)
    assert tokens(folder, deterministic=True, **CHANGES[change]) == alone


RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"}


@pytest.mark.parametrize("name", [*FOLDERS, "awq", "gptq-order", "pack-order"])
def test_two_ranks_give_the_tokens_of_one(name):
    """With act order, too: a rank's columns belong to groups all over the matrix."""
    folder = GOLDEN / name
    assert tokens(folder, **RANKS) == tokens(folder)


@pytest.mark.parametrize("ranks", [RANKS, {"pipeline_parallel_size": 2} | RANKS])
def test_quantised_while_loading_by_several_ranks(ranks, tmp_path):
    """Row-parallel matrices have other scales on two ranks, so tokens may differ; int8 is close
    enough here that they do not."""
    from tests.models.tiny import Tiny

    folder = Tiny("llama", {"num_hidden_layers": 2, "vocab_size": 128}).write(tmp_path).folder
    assert tokens(folder, quantization="int8", **ranks) == tokens(folder, quantization="int8")
