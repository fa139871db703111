"""In bfloat16 ranks round their parts of a sum, which must not cost accuracy."""

import random
from functools import cache

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.parallel.communicator import Communicator
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.tiny import Tiny
from tests.pairs import some

FIELDS = {"num_hidden_layers": 4, "vocab_size": 512}
MODELS = {
    "llama": Tiny("llama", FIELDS | {"num_key_value_heads": 4}),
    "qwen3_moe": Tiny("qwen3_moe", FIELDS, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", FIELDS, seed=1),
}
CHUNKS = (7, 20, 33)
THREADS = {"distributed_executor_backend": "threads"}


@pytest.fixture(scope="module")
def of_one_rank(checkpoint_of):  # noqa: F811
    """Of a model: its folder, what float32 gives, and bfloat16 in whole prompts and in chunks."""

    @cache
    def get(name):
        folder = checkpoint_of(MODELS[name]).folder
        chunks = [prompt_logprobs(folder, long_prefill_token_threshold=size) for size in CHUNKS]
        return folder, prompt_logprobs(folder, "float32"), (prompt_logprobs(folder), *chunks)

    return get


def prompt_logprobs(folder, dtype="bfloat16", **fields):
    """Log-probabilities of the tokens of eight prompts, given those before: [8, 79]."""
    generator = random.Random(0)
    prompts = [[generator.randrange(512) for _ in range(80)] for _ in range(8)]
    engine = {"max_model_len": 128, "num_gpu_blocks_override": 200, "enable_prefix_caching": False}
    llm = LLM(folder, dtype=dtype, enforce_eager=True, **engine, **fields)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    inputs = [{"prompt_token_ids": each} for each in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    llm.close()
    return torch.tensor([
        [each[token].logprob for each, token in zip(one.prompt_logprobs[1:], ids[1:], strict=True)]
        for one, ids in zip(outputs, prompts, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("name", some(("llama", "qwen3_moe"), MODELS))
def test_ranks_are_as_near_to_float32_as_one_rank(name, of_one_rank):
    """And as chunks: what these change alone depends on which kernels ran, and may be nearly 0."""
    folder, exact, in_bf16 = of_one_rank(name)
    alone = [(logprobs - exact).abs() for logprobs in in_bf16]
    for fields in (
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        *([{"tensor_parallel_size": 2, "enable_expert_parallel": True}] * (name != "llama")),
    ):
        error = (prompt_logprobs(folder, **THREADS, **fields) - exact).abs()
        assert error.mean() <= 1.25 * max(each.mean() for each in alone), fields
        assert error.quantile(0.99) <= 1.5 * max(each.quantile(0.99) for each in alone), fields


@pytest.mark.mutation
def test_parts_with_too_few_bits_are_found(of_one_rank, monkeypatch):
    """As if the parts of a sum lost three of their eight bits."""
    right = Communicator.sum

    def coarse(self, part):
        return right(self, (part.view(torch.int16) & ~7).view(torch.bfloat16).contiguous())

    monkeypatch.setattr(Communicator, "sum", coarse)
    with pytest.raises(AssertionError):
        test_ranks_are_as_near_to_float32_as_one_rank("llama", of_one_rank)


def test_stages_have_the_bits_of_one_rank(of_one_rank):
    """What crosses a boundary is rounded once, as the next norm would."""
    folder, _, (alone, *_) = of_one_rank("llama")
    assert torch.equal(alone, prompt_logprobs(folder, pipeline_parallel_size=2, **THREADS))
