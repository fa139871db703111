"""Rotary position embedding (RoPE) with all supported scaling schemes."""

import math

import torch
from torch import Tensor, nn

from minillm import ops
from minillm.config import RopeConfig


def inverse_frequencies(
    rope: RopeConfig, dim: int, max_position_embeddings: int, max_model_len: int
) -> Tensor:
    """Inverse frequency of each pair of dimensions, float32 [dim / 2].

    `dynamic` and `longrope` depend on the context length. Here that is `max_model_len` and not the
    current length, so that cached keys remain valid as a sequence grows.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim  # [dim / 2]
    theta, trained = rope.theta, max_position_embeddings
    original = rope.original_max_position_embeddings or trained
    if rope.rope_type == "dynamic":
        # NTK-aware base (Peng et al., 2023), if the context exceeds the trained length.
        ratio = max(max_model_len, trained) / trained
        theta *= (rope.factor * ratio - (rope.factor - 1)) ** (dim / (dim - 2))
    frequencies = 1.0 / theta**exponent
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(frequencies, rope, original)
    if rope.rope_type == "yarn":
        return _yarn(frequencies, rope, dim, original)
    if rope.rope_type == "longrope":
        factors = rope.long_factor if max_model_len > original else rope.short_factor
        return 1.0 / (torch.tensor(factors, dtype=torch.float32) * theta**exponent)
    return frequencies


def _llama3(frequencies: Tensor, rope: RopeConfig, original: int) -> Tensor:
    """Llama 3.1: divide low frequencies by `factor`, keep high ones, blend in between."""
    turns = original * frequencies / (2 * math.pi)  # full turns within the trained length
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(frequencies: Tensor, rope: RopeConfig, dim: int, original: int) -> Tensor:
    """YaRN (Peng et al., 2023), section 3.2: divide low frequencies by `factor`, keep high ones."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    return slowed * frequencies / rope.factor + (1 - slowed) * frequencies


def yarn_temperature(factor: float, mscale: float) -> float:
    """YaRN's attention scale sqrt(1 / t) = 0.1 m ln(s) + 1 (Peng et al., 2023, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def attention_factor(rope: RopeConfig, max_position_embeddings: int) -> float:
    """Scale of cos and sin with yarn and longrope; 1 with other schemes."""
    if rope.rope_type not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        original = rope.original_max_position_embeddings or max_position_embeddings
        return math.sqrt(1 + math.log(max(rope.factor, 1.0)) / math.log(original))
    if rope.mscale and rope.mscale_all_dim:
        return yarn_temperature(rope.factor, rope.mscale) / yarn_temperature(
            rope.factor, rope.mscale_all_dim
        )
    return yarn_temperature(rope.factor, 1.0)


class RotaryEmbedding(nn.Module):
    """Positions [N] -> cos and sin [N, dim / 2] in float32, computed once per forward pass."""

    def __init__(
        self, rope: RopeConfig, dim: int, max_position_embeddings: int, max_model_len: int
    ):
        super().__init__()
        self.factor = attention_factor(rope, max_position_embeddings)
        with torch.device("cpu"):
            frequencies = inverse_frequencies(rope, dim, max_position_embeddings, max_model_len)
        self.frequencies = nn.Buffer(frequencies, persistent=False)

    def forward(self, positions: Tensor, plain: bool = False) -> tuple[Tensor, Tensor]:
        """[N] -> two of [N, dim / 2]; `plain` uses torch operations only."""
        return ops.cos_sin(positions, self.frequencies, self.factor, plain)
