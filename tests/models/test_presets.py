"""Presets against transformers' models of the same shape, and against published totals."""

import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from minillm.config import RopeConfig
from minillm.errors import ConfigError
from minillm.models.families import parse_config
from minillm.models.presets import FOLDER, PRESETS, Presets, preset
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
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
    "smollm2-135m": 134_515_008,
}

# Fields that no family reads, with the value that changes nothing in the model.
UNREAD: dict[str, Any] = {
    "attention_dropout": 0.0,
    "ep_size": 1,
    "output_router_logits": False,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "use_cache": True,
    "use_mrope": False,
}
ABOUT_TRAINING_OR_TEXT = {
    *("architectures", "is_llama_config", "initializer_range"),
    *("bos_token_id", "eos_token_id", "num_nextn_predict_layers"),
    *("aux_loss_alpha", "router_aux_loss_coef", "seq_aux"),
}
GROUPS = {"n_group", "topk_group"}  # not used by greedy routing
WINDOWS = {"sliding_window", "max_window_layers"}  # not used when use_sliding_window is false


class Watched(dict[str, Any]):
    """A ``config.json`` that records which of its fields were read."""

    def __init__(self, data: dict[str, Any]) -> None:
        super().__init__(data)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.read.add(name)
        return super().get(name, default)


def published(name: str) -> dict[str, Any]:
    """The fields of a preset's file."""
    data: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return data


def ignored_fields(data: dict[str, Any]) -> Iterator[str]:
    """Fields that the family does not read and that may describe the architecture."""
    watched = Watched(data)
    parse_config(watched)
    known = {"type", "rope_type", *(field.name for field in fields(RopeConfig))}
    yield from set(data.get("rope_scaling") or {}) - known
    allowed = set(ABOUT_TRAINING_OR_TEXT)
    allowed |= GROUPS if data.get("topk_method") == "greedy" else set()
    allowed |= WINDOWS if data.get("use_sliding_window") is False else set()
    for name in data.keys() - watched.read - allowed:
        if name not in UNREAD or data[name] != UNREAD[name]:
            yield name


@pytest.mark.parametrize("name", PRESETS)
def test_the_families_ignore_no_field_of_a_file(name):
    assert not list(ignored_fields(published(name)))


@pytest.mark.parametrize(
    ("name", "extra", "ignored"),
    [
        ("llama-2-7b", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("llama-2-7b", {"pretraining_tp": 2}, "pretraining_tp"),
        ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 2, "mscal": 1}}, "mscal"),
        ("deepseek-v2-lite", {"topk_groups": 3}, "topk_groups"),
    ],
)
def test_an_ignored_field_is_found(name, extra, ignored):
    assert list(ignored_fields(published(name) | extra)) == [ignored]


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_reads_the_same_model_from_the_file(name):
    data = published(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**data))
    shapes = {n: p.shape for n, p in model.named_parameters()}
    assert shapes == {n: p.shape for n, p in hf_model(preset(name), "meta").named_parameters()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"^The preset file .*odd\.json cannot be read: No such file or directory\.$"),
        ("{", r"^The preset file .*odd\.json cannot be read: Expecting property name.*\.$"),
        ("[1]", r"^The preset file .*odd\.json cannot be read: it holds a list, not a JSON obj"),
        ('{"model_type": "lama"}', r"model_type 'lama'; minillm knows .* Did you mean 'llama'\?$"),
        ('{"model_type": "llama"}', r"no 'num_attention_heads', which this model family needs\.$"),
    ],
)
def test_a_malformed_file_gives_one_sentence(tmp_path: Path, text, message):
    if text is not None:
        (tmp_path / "odd.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match=message):
        Presets(tmp_path, ("odd",))["odd"]


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


def test_unknown_name_proposes_the_nearest():
    with pytest.raises(ConfigError, match=r"'lama-3\.1-8b'.*Did you mean 'llama-3\.1-8b'"):
        preset("lama-3.1-8b")
