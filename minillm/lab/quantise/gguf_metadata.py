"""A model's configuration as the metadata of a GGUF file, the inverse of `gguf/settings.py`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from minillm.config import ModelConfig, RopeConfig
from minillm.errors import UnsupportedFeatureError
from minillm.gguf.defaults import END_TOKENS
from minillm.layers.rope import inverse_frequencies
from minillm.models.checkpoint import ModelSource
from minillm.models.gguf import SAMPLING

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
     "qwen3_moe": "qwen3moe"}
)  # fmt: skip
FILE_TYPES: Mapping[str, int] = MappingProxyType(  # general.file_type
    {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "BF16": 32}
)


def metadata(source: ModelSource, kind: str) -> dict[str, Any]:
    """The fields that describe the model, its end tokens and its sampling parameters."""
    config = source.config
    arch = ARCHITECTURES[config.family]
    own: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        **rope_fields(config.rope),
    }
    if config.moe:
        own |= {
            "expert_count": config.moe.num_experts,
            "expert_used_count": config.moe.num_experts_per_token,
            "expert_feed_forward_length": config.moe.intermediate_size,
        }
    if config.sliding_windows:
        own["attention.sliding_window"] = config.sliding_windows[0]
    ends = dict(zip(END_TOKENS, source.eos_token_ids, strict=False))
    sampling = {theirs: source.sampling_defaults.get(ours) for theirs, ours in SAMPLING.items()}
    return {
        "general.architecture": arch,
        "general.name": Path(source.name).name,
        "general.file_type": FILE_TYPES[kind],
        "general.quantization_version": 2,
        **{f"{arch}.{name}": value for name, value in own.items()},
        **{f"tokenizer.ggml.{name}_token_id": value for name, value in ends.items()},
        **{f"general.sampling.{k}": v for k, v in sampling.items() if v is not None},
    }


def check_writable(config: ModelConfig, num_ends: int) -> None:
    """Raise UnsupportedFeatureError if GGUF, as llama.cpp reads it, cannot describe the model."""
    windows, rope = config.sliding_windows, config.rope
    llama = ARCHITECTURES.get(config.family) == "llama"
    reasons = {
        f"its family is {config.family} (written are {', '.join(ARCHITECTURES)})":
            config.family not in ARCHITECTURES,
        "some of its layers have no experts":
            config.moe is not None and bool(config.moe_layers) and not all(config.moe_layers),
        "the weights of its experts are not normalised":
            config.moe is not None and not config.moe.normalize,
        "its layers have different sliding windows": len(set(windows)) > 1,
        "it has a sliding window": bool(windows) and not llama,
        f"it has {num_ends} end tokens (at most {len(END_TOKENS)})": num_ends > len(END_TOKENS),
        f"its RoPE is {rope.rope_type}": rope.rope_type in ("dynamic", "longrope"),
        "its YaRN has an own attention factor": rope.rope_type == "yarn"
            and (rope.attention_factor, rope.mscale, rope.truncate) != (None, None, True),
    }  # fmt: skip
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedFeatureError(f"This model cannot be written as a GGUF file: {reason}.")


def rope_fields(rope: RopeConfig) -> dict[str, Any]:
    """The fields of the position encoding; llama3 has a tensor instead (`frequency_factors`)."""
    fields: dict[str, Any] = {"rope.freq_base": rope.theta}
    if rope.rope_type in ("linear", "yarn"):
        fields |= {"rope.scaling.type": rope.rope_type, "rope.scaling.factor": rope.factor}
    if rope.rope_type == "yarn":
        fields |= {
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
        if rope.original_max_position_embeddings:
            length = rope.original_max_position_embeddings
            fields["rope.scaling.original_context_length"] = length
    return fields


def frequency_factors(config: ModelConfig) -> Tensor | None:
    """What llama3 RoPE divides each frequency by, float32 [D / 2]; None for other schemes."""
    if config.rope.rope_type != "llama3":
        return None
    length = config.max_position_embeddings
    plain, scaled = (
        inverse_frequencies(rope, config.head_dim, length, length)
        for rope in (replace(config.rope, rope_type="default"), config.rope)
    )
    return plain / scaled
