"""Llama, Mistral and Mixtral."""

from minillm.config import ModelConfig, MoEConfig
from minillm.models.families.fields import (
    Fields,
    common,
    every_layer,
    flag,
    integer,
    number,
    rope_config,
    window_of,
)


def llama(data: Fields) -> ModelConfig:
    """Llama 1 to 3, and SmolLM2, which has the same architecture."""
    bias = flag(data, "attention_bias")
    mlp_bias = flag(data, "mlp_bias")
    return common(data, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=mlp_bias)


def mistral(data: Fields) -> ModelConfig:
    """Mistral: Llama with a sliding window, by default 4,096."""
    window = every_layer(data, window_of(data, 4096))
    return common(data, "mistral", kv_heads=8, sliding_windows=window)


def mixtral(data: Fields) -> ModelConfig:
    """Mixtral: softmax over all experts; weights of the top k are normalised."""
    return common(
        data,
        "mixtral",
        kv_heads=8,
        rope=rope_config(data, theta=1e6),
        rms_norm_eps=number(data, "rms_norm_eps", 1e-5),
        sliding_windows=every_layer(data, window_of(data, None)),
        moe=MoEConfig(
            num_experts=integer(data, "num_local_experts", data.get("num_experts")),
            num_experts_per_token=integer(data, "num_experts_per_tok", 2),
            intermediate_size=integer(data, "intermediate_size"),
        ),
    )
