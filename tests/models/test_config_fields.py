"""Every field of config.json: absent, it means what transformers takes it to mean; odd, it is an
error of ours that names it, never a crash and never silence."""

from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from minillm.errors import ConfigError, MinillmError, UnsupportedFeatureError
from minillm.layers.rope import attention_factor, inverse_frequencies
from minillm.models.decoder import Decoder
from minillm.models.families import FAMILIES, parse_config
from tests.models.tiny import CASES, ROPES, old_style

ODD: list[Any] = [None, True, False, -1, 0, 1, 2**31 - 1, 0.5, float("nan"), "x", "", [], [1], {}]


# An absent num_key_value_heads has a test of its own, with enough heads for transformers' numbers;
# num_local_experts is called num_experts by older files.
UNLIKE_TRANSFORMERS = {"model_type", "num_key_value_heads", "num_local_experts"}


def config_of(family: str, rope: str = "default") -> dict[str, Any]:
    """A tiny config.json of the family, without building a model."""
    tiny = ROPES[rope].tiny(family)
    return tiny.config().to_diff_dict()


@pytest.mark.parametrize("style", [dict, old_style])
@pytest.mark.parametrize("name", CASES)
def test_absent_field_means_what_transformers_takes_it_to_mean(name, style):
    config_class = CONFIG_MAPPING[CASES[name].family]
    data = style(CASES[name].config().to_diff_dict())
    compared = 0
    for name in data.keys() - UNLIKE_TRANSFORMERS:
        rest = {key: value for key, value in data.items() if key != name}
        refusal = ""
        try:
            ours = parse_config(rest)
        except ConfigError as error:
            refusal = str(error)  # a size that every config.json gives: it says which
        if refusal:
            assert name.removesuffix("_tok") in refusal or "experts" in refusal
        else:
            assert ours == parse_config(config_class(**deepcopy(rest)).to_dict()), name
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("style", [dict, old_style])
@pytest.mark.parametrize("rope", ROPES)
def test_absent_rope_field_means_what_transformers_takes_it_to_mean(rope, style):
    data = config_of("llama", rope)
    for name in data["rope_parameters"].keys() - {"rope_type"}:
        parameters = {k: v for k, v in data["rope_parameters"].items() if k != name}
        rest = style(data | {"rope_parameters": {"rope_theta": 10000.0} | parameters})
        rest = {k: v for k, v in rest.items() if k != name}
        try:
            theirs = LlamaConfig(**deepcopy(rest))  # it completes the dictionary
        except KeyError:  # transformers needs it
            continue
        ours, kind = parse_config(rest), theirs.rope_parameters["rope_type"]
        length = ours.max_position_embeddings
        found = inverse_frequencies(ours.rope, ours.rotary_dim, length, length)
        if kind == "default":
            theta = theirs.rope_parameters["rope_theta"]
            expected, factor = theta ** (-torch.arange(0, 16, 2) / 16), 1.0
        else:
            expected, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=length)
        assert torch.allclose(found, expected, rtol=1e-5), name
        assert attention_factor(ours.rope, length) == pytest.approx(factor), name


# The length that vLLM derives: `factor` lengthens all types but llama3 and longrope, and yarn from
# the length before.
LENGTHS = {"default": 256, "linear": 640, "dynamic, below": 1024, "dynamic, beyond": 256,
           "llama3": 256, "yarn": 256, "longrope, beyond": 256,
           "longrope, factor": 256}  # fmt: skip


@pytest.mark.parametrize("rope", LENGTHS)
def test_longest_context(rope):
    assert parse_config(config_of("llama", rope)).longest_context == LENGTHS[rope]
    vicuna = config_of("llama") | {"max_position_embeddings": 4096, "rope_parameters": None}
    vicuna["rope_scaling"] = {"type": "linear", "factor": 4.0}
    assert parse_config(vicuna).longest_context == 16384
    grown = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = config_of("qwen2") | {"max_position_embeddings": 32768, "rope_parameters": grown}
    assert parse_config(qwen).longest_context == 131072


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_value_is_a_named_error(family):
    data = config_of(family)
    for name in data.keys() - {"model_type"}:
        for value in ODD:
            build_or_refuse(data | {name: value}, name, value)


@pytest.mark.parametrize("rope", ROPES)
def test_odd_rope_value_is_a_named_error(rope):
    data = config_of("llama", rope)
    for name in data["rope_parameters"]:
        for value in ODD:
            odd = data["rope_parameters"] | {name: value}
            build_or_refuse(data | {"rope_parameters": odd}, name, value)


def build_or_refuse(data: dict[str, Any], name: str, value: Any) -> None:
    """Either an error of ours, or a model with fields of the declared types."""
    try:
        config = parse_config(data)
    except MinillmError:
        return
    for part in (config, config.rope, config.mla, config.moe):
        for field in fields(part) if part else ():
            kinds = str(field.type).removeprefix("<class '").removesuffix("'>").split(" | ")
            got = type(getattr(part, field.name)).__name__.replace("NoneType", "None")
            assert got in kinds or kinds[0] not in ("int", "float", "bool", "str"), (name, value)
    if config.num_layers < 10:
        Decoder(config, device="meta")


@pytest.mark.parametrize(
    ("family", "change", "culprit"),
    [
        ("llama", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "layer types"),
        ("llama", {"dtype": "float64"}, "float64"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "noaux_tc"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
        ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        (
            "qwen2",
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            "chunked",
        ),
    ],
)
def test_what_would_change_an_output_is_refused_by_name(family, change, culprit):
    with pytest.raises(UnsupportedFeatureError, match=culprit):
        parse_config(config_of(family) | change)


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"model_type": "lama"}, "Did you mean 'llama'"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "deepseek_v3", "topk_group": 1, "num_experts_per_tok": 5}, "5 experts"),
        ({"rope_parameters": {"rope_type": "cubic"}}, "cubic"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"num_attention_heads": 3}, "num_kv_heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0.0"),
        ({"model_type": "deepseek_v3", "routed_scaling_factor": float("nan")}, "routed_scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "mscale": float("nan")}}, "mscale = nan"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [float("nan")]}}, "long_f"),
        ({"num_hidden_layers": 1025}, "num_hidden_layers = 1025; .* up to 1024"),
        ({"model_type": "mistral", "num_hidden_layers": 1 << 24}, "num_hidden_layers"),
        ({"model_type": "qwen3_moe", "num_experts": 4097}, "num_experts = 4097"),
        ({"model_type": "mixtral", "num_local_experts": 4097}, "num_local_experts = 4097"),
        ({"model_type": "deepseek_v2", "n_routed_experts": 1 << 20}, "n_routed_experts"),
    ],
)
def test_wrong_value_is_a_config_error(change, culprit):
    family = change.get("model_type")
    data = config_of(family if family in FAMILIES else "llama") | change
    with pytest.raises(ConfigError, match=culprit):
        parse_config(data)


# Not DeepSeek: latent attention has no KV heads to count.
@pytest.mark.parametrize("family", [name for name in FAMILIES if "deepseek" not in name])
def test_absent_number_of_kv_heads_is_the_family_s_own(family):
    config_class = CONFIG_MAPPING[family]
    data = config_of(family) | {"num_attention_heads": 32, "head_dim": 16}
    del data["num_key_value_heads"]
    assert parse_config(data).num_kv_heads == config_class(**data).num_key_value_heads
    assert parse_config(data | {"num_key_value_heads": None}).num_kv_heads == 32
