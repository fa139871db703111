"""Families with experts and latent attention, packed and in one call of C, against transformers, on
tiny random checkpoints whose sizes are whole panels."""

import pytest
import torch

from minillm.models.all_layers import AllLayers
from minillm.models.packing import pack_weights
from minillm.ops import cpu
from tests.models.parity import load, measure, reference_logits, whole
from tests.models.tiny import YARN, Checkpoint, Tiny, prompt

BF16, F32 = torch.bfloat16, torch.float32
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 64,
}
MSCALE = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
PANELS = {
    "qwen3_moe": Tiny("qwen3_moe", {"head_dim": 32, "moe_intermediate_size": 64}),
    "qwen3_moe, a dense layer, not normalised": Tiny(
        "qwen3_moe",
        {
            "head_dim": 16,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "attention_bias": True,
        },
    ),
    "mixtral": Tiny("mixtral", {"sliding_window": 20}),
    "deepseek_v2": Tiny(  # as V2-Lite
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2},
        MSCALE,
    ),
    "deepseek_v2, groups": Tiny(  # as V2
        "deepseek_v2",
        LATENT
        | {
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 1,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "deepseek_v3": Tiny("deepseek_v3", LATENT | {"n_group": 4, "topk_group": 2}, MSCALE),
}


def packed(checkpoint: Checkpoint, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    if cpu.functions(dtype) is None:
        pytest.skip(cpu.describe(dtype))
    monkeypatch.setenv(cpu.PANELS, "1")
    model = load(checkpoint, dtype)
    pack_weights(model)
    assert isinstance(model.all_layers, AllLayers)
    return model


@pytest.mark.parametrize("name", PANELS)
def test_logits_and_greedy_tokens_of_one_call(name, checkpoint_of, monkeypatch):
    checkpoint = checkpoint_of(PANELS[name])
    model = packed(checkpoint, F32, monkeypatch)
    parity = measure(checkpoint, model, new_tokens=16)
    assert parity.holds, parity


@pytest.mark.parametrize("name", PANELS)
def test_bf16_is_as_near_as_transformers_is(name, checkpoint_of, monkeypatch):
    """Both against float32 with the same rounded weights; the median of 130 tokens, because a
    rounded router now and then chooses another expert."""
    checkpoint, ids = checkpoint_of(PANELS[name]), prompt(130)
    model = packed(checkpoint, BF16, monkeypatch)
    rounded = checkpoint.tiny.build().bfloat16()
    reference = Checkpoint(checkpoint.folder, rounded, checkpoint.tiny)
    theirs = reference_logits(reference, ids)
    rounded.float()
    exact = reference_logits(reference, ids)

    def error(logits: torch.Tensor) -> float:
        return float(((logits.float() - exact).norm(dim=1) / exact.norm(dim=1)).median())

    assert error(whole(model, ids)) < 1.2 * error(theirs)
