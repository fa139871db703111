"""Which way a CPU computes the layers, and that each gives the tokens of plain torch.

Weights are in panels on every processor. `tests/matrix` runs each way under all that an engine
does."""

from collections import Counter

import pytest
import torch

from minillm import SamplingParams
from minillm.models.all_layers import AllLayers
from minillm.ops import cpu
from tests.engine.small import make, tokens
from tests.models.test_packed_parity import LATENT, MSCALE
from tests.models.tiny import Tiny
from tests.pairs import some

SHORT = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "intermediate_size": 128}
MODELS = {
    "qwen3": Tiny("qwen3", SHORT | {"head_dim": 32}, seed=4),
    "qwen3_moe": Tiny("qwen3_moe", SHORT | {"head_dim": 32, "num_experts": 8}, seed=2),
    "deepseek_v2": Tiny(
        "deepseek_v2", LATENT | SHORT | {"n_shared_experts": 2, "mlp_bias": True}, MSCALE, seed=1
    ),
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = [[5, 9, 5, 9, 5, 9, 5], list(range(3, 60)), [7] * 11, [100]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
RANKS = {"distributed_executor_backend": "threads", "tensor_parallel_size": 2}
STAGES = {"distributed_executor_backend": "threads", "pipeline_parallel_size": 2}
WAYS = {  # and whether all layers run in one call
    "one call": ({}, True),
    "chunks, swapping": (
        {"long_prefill_token_threshold": 7, "num_gpu_blocks_override": 26, "swap_space": 0.01},
        True,
    ),
    "speculation": ({"speculative_config": NGRAM}, True),
    "two ranks, halves": (RANKS, True),
    "two stages": (STAGES, None),
    "ranks with whole experts": (RANKS | {"enable_expert_parallel": True}, False),
    "deterministic": ({"deterministic": True}, False),
}


@pytest.mark.skipif(cpu.functions(torch.float32) is None, reason=str(cpu.describe(torch.float32)))
@pytest.mark.parametrize("name", some(("qwen3", "deepseek_v2"), MODELS))
def test_tokens_are_those_of_plain_torch(name, tmp_path, monkeypatch):
    monkeypatch.setenv(cpu.PANELS, "1")
    calls, takes = Counter(), AllLayers.takes

    def watched(self, *arguments):
        result = takes(self, *arguments)
        calls["all layers" if result else "stepped aside"] += 1
        return result

    monkeypatch.setattr(AllLayers, "takes", watched)
    folder = MODELS[name].write(tmp_path).folder

    def generated(**more):
        with make(folder, **{"max_model_len": 96, "num_gpu_blocks_override": 200} | more) as llm:
            return [tokens(each) for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    plain = generated(enforce_eager=True)
    assert not calls["all layers"]
    for way, (arguments, expected) in WAYS.items():
        if name == "qwen3" and (expected is False):
            continue  # no experts, and fixed sums in deterministic mode
        calls.clear()
        assert generated(**arguments) == plain, way
        assert expected is None or (calls["all layers"] > 0) == expected, way
        assert not (expected and calls["stepped aside"]), way
