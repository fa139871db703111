"""Phi-3 and Phi-4."""

from minillm.config import ModelConfig
from minillm.models.families.fields import (
    Fields,
    common,
    every_layer,
    integer,
    number,
    rope_config,
    window_of,
)

MERGED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))


def phi3(data: Fields) -> ModelConfig:
    """Phi-3 (Abdin et al., 2024) and Phi-4: Llama whose checkpoints merge the first products of
    attention and of the MLP."""
    original = integer(data, "original_max_position_embeddings", 4096)
    return common(
        data,
        "phi3",
        rope=rope_config({**data, "original_max_position_embeddings": original}),
        rms_norm_eps=number(data, "rms_norm_eps", 1e-5),
        sliding_windows=every_layer(data, window_of(data, None)),
        merged_matrices=MERGED,
    )
