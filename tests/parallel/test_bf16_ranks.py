"""In bfloat16 ranks round their parts of a sum, which must not cost accuracy."""

import random

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.parallel.communicator import Communicator
from tests.models.tiny import Tiny
from tests.pairs import some

FIELDS = {"num_hidden_layers": 4, "vocab_size": 512}
MODELS = {
    "llama": Tiny("llama", FIELDS | {"num_key_value_heads": 4}),
    "qwen3_moe": Tiny("qwen3_moe", FIELDS, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", FIELDS, seed=1),
}
CHUNKS = (7, 20, 33)


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
def test_ranks_are_as_near_to_float32_as_one_rank(name, tmp_path):
    """And as chunks: what these change alone depends on which kernels ran, and may be nearly 0."""
    folder = MODELS[name].write(tmp_path).folder
    exact = prompt_logprobs(folder, "float32")
    chunks = [prompt_logprobs(folder, long_prefill_token_threshold=each) for each in CHUNKS]
    alone = [(each - exact).abs() for each in (prompt_logprobs(folder), *chunks)]
    for fields in (
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        *([{"tensor_parallel_size": 2, "enable_expert_parallel": True}] * (name != "llama")),
    ):
        found = prompt_logprobs(folder, distributed_executor_backend="threads", **fields)
        error = (found - exact).abs()
        assert error.mean() <= 1.25 * max(each.mean() for each in alone), fields
        assert error.quantile(0.99) <= 1.5 * max(each.quantile(0.99) for each in alone), fields


def test_parts_with_too_few_bits_are_found(tmp_path, monkeypatch):
    """As if the parts of a sum lost three of their eight bits."""
    right = Communicator.sum

    def coarse(self, part):
        return right(self, (part.view(torch.int16) & ~7).view(torch.bfloat16).contiguous())

    monkeypatch.setattr(Communicator, "sum", coarse)
    with pytest.raises(AssertionError):
        test_ranks_are_as_near_to_float32_as_one_rank("llama", tmp_path)


def test_stages_have_the_bits_of_one_rank(tmp_path):
    """What crosses a boundary is rounded once, as the next norm would."""
    folder = MODELS["llama"].write(tmp_path).folder
    more = {"pipeline_parallel_size": 2, "distributed_executor_backend": "threads"}
    assert torch.equal(prompt_logprobs(folder), prompt_logprobs(folder, **more))
