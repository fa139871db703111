"""Round-to-nearest quantisation (RTN) to the integers of checkpoint formats.

    w' = scale * (code - zero),  code = clamp(round(w / scale) + zero, 0, 2^b - 1)

    asymmetric  scale = (max w - min w) / (2^b - 1), zero = round(-min w / scale); 0 is in the range
    symmetric   scale = 2 max |w| / (2^b - 1), zero = 2^(b-1), as in GPTQ and compressed-tensors

Codes are computed with the scale as it is stored, so that rounding the scale costs no extra error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.quantization.quantized import Quantized, integer_codes
from minillm.quantization.rounding import TINY, group_of


@dataclass(frozen=True)
class Grid:
    """The values that the weights of a group may take: scale * (code - zero), 2 to 8 bits.

    `dtype` is the type of stored scales. Tensors have the dtype of the weights.
    """

    bits: int = 4
    symmetric: bool = False
    dtype: torch.dtype = torch.float16

    @property
    def most(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

    def fit(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The scale and the zero point of each group: [.., g] -> [..], [..]"""
        low, high = weights.amin(-1).clamp(max=0), weights.amax(-1).clamp(min=0)
        if self.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = ((high - low) / self.most).clamp(min=TINY).to(self.dtype).to(weights.dtype)
        if self.symmetric:
            return scale, torch.full_like(scale, 1 << (self.bits - 1))
        return scale, (-low / scale).round().clamp(0, self.most)

    def codes(self, weights: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest codes of weights, whole numbers."""
        return ((weights / scale).round() + zero).clamp(0, self.most)

    def quantized(
        self, codes: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None = None
    ) -> Quantized:
        """Codes [out, in] with scales and zero points [out, groups] as they are stored."""
        shift = 1 << (self.bits - 1) if self.bits == 8 else 0  # 8 bits: signed codes
        offsets = (zeros - shift).to(torch.int8)
        plain = self.bits == 8 and not offsets.any()
        stored = integer_codes(codes - shift, self.bits)
        return Quantized(
            stored, scales.to(self.dtype), None if plain else offsets, None, None, order
        )


def round_to_grid(weight: Tensor, grid: Grid, group: int) -> Quantized:
    """Quantise [out, in] in groups of `group` inputs (-1: whole rows) by rounding."""
    groups = weight.float().unflatten(1, (-1, group_of(weight.shape[1], group)))
    scales, zeros = grid.fit(groups)
    codes = grid.codes(groups, scales[..., None], zeros[..., None])
    return grid.quantized(codes.flatten(1), scales, zeros)
