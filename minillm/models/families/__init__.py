"""Parses a Hugging Face ``config.json`` into a `ModelConfig`: one function per model family."""

from collections.abc import Callable, Mapping

from minillm.config import ModelConfig
from minillm.errors import ConfigError, did_you_mean
from minillm.models.families.deepseek import deepseek_v2, deepseek_v3
from minillm.models.families.fields import Fields, only
from minillm.models.families.llama import llama, mistral, mixtral
from minillm.models.families.olmo import olmo2
from minillm.models.families.phi import phi3
from minillm.models.families.qwen import qwen2, qwen3, qwen3_moe
from minillm.models.families.smollm import smollm3

FAMILIES: Mapping[str, Callable[[Fields], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "olmo2": olmo2,
    "smollm3": smollm3,
    "phi3": phi3,
}


def parse_config(data: Fields) -> ModelConfig:
    """Describe the model of a parsed ``config.json``.

    Raises ConfigError (unknown family, missing or ill-typed field) and UnsupportedFeatureError.
    """
    family = str(data.get("model_type"))
    if family not in FAMILIES:
        hint = did_you_mean(family, FAMILIES)
        raise ConfigError(
            f"config.json says model_type {family!r}; minillm knows {', '.join(FAMILIES)}.{hint}"
        )
    only(data, "hidden_act", "silu")
    return FAMILIES[family](data)
