"""The program of chapter 01b, and what e01.3 and e01.4 compare with, beside transformers."""

import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from minillm_exercises.chapters import ch01b, ch01b_forward
from tests.pairs import one_in

EXERCISES = Path(__file__).resolve().parents[2] / "exercises"
SHAPE = {
    "vocab_size": 11, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 10, "initializer_range": 0.2,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": PLAIN}),
    "llama 3, untied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": LLAMA3, "tie_word_embeddings": False},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"rope_parameters": PLAIN}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"rope_parameters": PLAIN}),
}
IDS = [3, 0, 7, 7, 10, 2, 5, 1, 9, 4, 4, 6, 8] * 3


@torch.no_grad()
def model_of(family):
    """Weights by name, the configuration of the exercises, and transformers' logits."""
    model_type, config_type, options = FAMILIES[family]
    torch.manual_seed(1)
    model = model_type(config_type(**{"tie_word_embeddings": True} | SHAPE | options)).eval()
    for weight in model.parameters():
        if weight.ndim == 1:  # norms are 1 and biases 0 at first
            weight.add_(torch.randn(len(weight)) * 0.3)
    weights = {name: each.detach().clone() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    rope = options["rope_parameters"]
    config = SHAPE | {"rope_theta": 100.0, "rope_scaling": rope if rope is LLAMA3 else None}
    return weights, config, model(torch.tensor([IDS])).logits[0]


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_program_computes_what_transformers_computes(family):
    weights, config, wanted = model_of(family)
    torch.testing.assert_close(ch01b_forward.forward(weights, config, IDS), wanted)


@pytest.mark.parametrize("family", one_in(3, FAMILIES))
def test_the_answers_of_e01_4_and_what_checks_them_agree_with_transformers(family):
    weights, config, wanted = model_of(family)
    solution = module_at(EXERCISES / "_solutions/e01_4/solution.py")
    checks = module_at(EXERCISES / "e01_forward_pass/small_models.py")
    for found in (solution.forward, checks.expected):
        torch.testing.assert_close(found(weights, config, IDS), wanted)


def test_what_checks_e01_3_agrees_with_transformers():
    weights, config, wanted = model_of("qwen3")
    checks = module_at(EXERCISES / "e01_forward_pass/small_models.py")
    torch.testing.assert_close(checks.expected(weights, config, IDS), wanted)


def test_the_page_uses_what_is_written_and_right():
    def norm(x, weight, eps):
        return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight

    found = ch01b.parts({"norm": norm, "mlp": lambda *_: None, "rotate": lambda x, _: x + 1})
    assert found.norm is norm
    assert found.mlp is ch01b_forward.mlp
    assert found.rotate is ch01b_forward.rotate
