"""SmolLM3."""

from minillm.config import ModelConfig
from minillm.errors import ConfigError
from minillm.models.families.fields import (
    Fields,
    common,
    flag,
    integer,
    numbers,
    rope_config,
    window_of,
)
from minillm.models.families.qwen import LAYER_TYPES, upper_layers


def smollm3(data: Fields) -> ModelConfig:
    """SmolLM3 (Hugging Face, 2025): Llama without RoPE in some layers ("NoPE", arXiv 2305.19466),
    by default in every fourth."""
    layers, step = integer(data, "num_hidden_layers"), integer(data, "no_rope_layer_interval", 4)
    if step < 1:
        raise ConfigError(
            f"config.json says no_rope_layer_interval = {step}; it must be at least 1."
        )
    rotated = numbers(data, "no_rope_layers")  # 1: with RoPE, in spite of the name
    if data.get("no_rope_layers") is None:
        rotated = tuple(int((layer + 1) % step != 0) for layer in range(layers))
    if len(rotated) < layers:
        raise ConfigError(f"no_rope_layers has {len(rotated)} entries for {layers} layers.")
    rope_layers = tuple(value != 0 for value in rotated[:layers])
    bias = flag(data, "attention_bias")
    return common(
        data,
        "smollm3",
        kv_heads=4,
        rope=rope_config(data, theta=2e6),
        tie_word_embeddings=flag(data, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=flag(data, "mlp_bias"),
        rope_layers=() if all(rope_layers) else rope_layers,
        sliding_windows=_windows(data, rope_layers),
    )


def _windows(data: Fields, rope_layers: tuple[bool, ...]) -> tuple[int | None, ...]:
    """The windows of `layer_types`, which by default are in the layers without RoPE."""
    window = window_of(data, None) if flag(data, "use_sliding_window") else None
    kinds = data.get("layer_types")
    if window is None:
        if kinds is not None and kinds != [LAYER_TYPES[1]] * len(rope_layers):
            raise ConfigError(
                f"config.json says layer_types = {kinds!r}; without use_sliding_window and "
                f"sliding_window it must be {LAYER_TYPES[1]!r}, {len(rope_layers)} times."
            )
        return ()
    if kinds is None:
        kinds = [LAYER_TYPES[rotated] for rotated in rope_layers]
    return upper_layers({**data, "layer_types": kinds})
