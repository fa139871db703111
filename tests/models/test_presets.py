"""Presets against transformers' models of the same shape, and against published totals."""

import subprocess
import sys

import pytest

from minillm.errors import ConfigError
from minillm.models.presets import PRESETS, preset
from minillm.plan.parameters import parameter_count
from tests.plan.hf_shapes import hf_model

# What the model cards and the checkpoints' own headers say.
PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-3b": 3_085_938_688,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "smollm2-135m": 134_515_008,
}


def test_every_preset_has_a_published_total():
    assert set(PUBLISHED) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_equal_transformers_and_the_published_total(name):
    model = hf_model(preset(name), "meta")
    stored = sum(p.numel() for p in model.parameters())
    stored += sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias"))
    assert parameter_count(preset(name)).total == stored == PUBLISHED[name]


def test_breakdown_equals_the_tensors_by_name():
    model = hf_model(preset("deepseek-v3"), "meta")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    sizes = {n: t.numel() for n, t in tensors.items() if "rotary" not in n}
    count = parameter_count(preset("deepseek-v3"))

    def total(*parts: str) -> int:
        return sum(size for n, size in sizes.items() if any(p in n for p in parts))

    norms = total("norm")
    assert count.norms == norms
    assert count.attention == total("self_attn") - total("a_layernorm")
    assert count.embedding == total("embed_tokens")
    assert count.lm_head == total("lm_head")
    assert count.router == total("mlp.gate.")
    assert count.experts == total("mlp.experts.")
    assert count.shared_experts == total("shared_experts")
    assert count.mlp == total(*(f"layers.{i}.mlp." for i in range(3)))


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("deepseek-v2", 21.4), ("deepseek-v3", 37.6), ("qwen3-8b", 8.2)],
)
def test_active_parameters(name, billions):
    assert round(parameter_count(preset(name)).active / 1e9, 1) == billions


def test_presets_cannot_be_changed():
    with pytest.raises(TypeError):
        PRESETS["llama-2-7b"] = PRESETS["qwen3-8b"]


def test_unknown_name_proposes_the_nearest():
    with pytest.raises(ConfigError, match=r"'lama-3\.1-8b'.*Did you mean 'llama-3\.1-8b'"):
        preset("lama-3.1-8b")


def test_presets_import_no_torch():
    code = "import minillm.models.presets, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
