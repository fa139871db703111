"""Qwen2, Qwen3 and Qwen3-MoE."""

from minillm.config import ModelConfig, MoEConfig
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.models.families.fields import (
    Fields,
    common,
    every_layer,
    flag,
    integer,
    numbers,
    window_of,
)

LAYER_TYPES = ("sliding_attention", "full_attention")


def qwen2(data: Fields) -> ModelConfig:
    """Qwen2 and 2.5: biases on q, k and v, but not on o."""
    return common(data, "qwen2", kv_heads=32, qkv_bias=True, sliding_windows=upper_layers(data))


def qwen3(data: Fields) -> ModelConfig:
    """Qwen3: a norm on every query and key head."""
    bias = flag(data, "attention_bias")
    return common(
        data,
        "qwen3",
        kv_heads=32,
        head_dim=integer(data, "head_dim", 128),
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=upper_layers(data),
    )


def qwen3_moe(data: Fields) -> ModelConfig:
    """Qwen3-MoE: Qwen3 with experts instead of the MLP, except in `mlp_only_layers`."""
    bias = flag(data, "attention_bias")
    layers, step = integer(data, "num_hidden_layers"), integer(data, "decoder_sparse_step", 1)
    dense = numbers(data, "mlp_only_layers")
    if step < 1:
        raise ConfigError(f"config.json says decoder_sparse_step = {step}; it must be at least 1.")
    window = window_of(data, 4096) if flag(data, "use_sliding_window") else None
    return common(
        data,
        "qwen3_moe",
        kv_heads=4,
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        sliding_windows=every_layer(data, window),
        moe=MoEConfig(
            num_experts=integer(data, "num_experts", data.get("num_local_experts")),
            num_experts_per_token=integer(data, "num_experts_per_tok", 8),
            intermediate_size=integer(data, "moe_intermediate_size"),
            normalize=flag(data, "norm_topk_prob"),
        ),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def upper_layers(data: Fields) -> tuple[int | None, ...]:
    """Qwen's sliding windows: in the layers given by `layer_types`, or else from layer
    `max_window_layers` on."""
    if not flag(data, "use_sliding_window"):
        return ()
    window, layers = window_of(data, 4096), integer(data, "num_hidden_layers")
    kinds = data.get("layer_types")
    if kinds is None:
        first = integer(data, "max_window_layers", 28)
        kinds = [LAYER_TYPES[0] if i >= first else LAYER_TYPES[1] for i in range(layers)]
    if not isinstance(kinds, list) or not all(kind in LAYER_TYPES for kind in kinds):
        raise UnsupportedFeatureError(
            f"config.json says layer_types = {kinds!r}; this version has lists of "
            f"{' and '.join(LAYER_TYPES)}."
        )
    return tuple(window if kind == LAYER_TYPES[0] else None for kind in kinds)
