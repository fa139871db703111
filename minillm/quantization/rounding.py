"""Round-to-nearest quantisation (RTN): each group of weights gets a scale, without other data.

    w' = scale * (code - zero),  code = clamp(round(w / scale) + zero, 0, 2^b - 1)

    asymmetric  scale = (max w - min w) / (2^b - 1), zero = round(-min w / scale); 0 is in the range
    symmetric   scale = 2 max |w| / (2^b - 1), zero = 2^(b-1), as in GPTQ and compressed-tensors
    8 bits      scale = max |w| / 127, signed codes -127 .. 127 (`round_symmetric`)

Codes are computed with the scale as it is stored, so that rounding the scale costs no extra error.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError
from minillm.quantization.quantized import Quantized, integer_codes

GROUPS = (128, 64, 32)  # group sizes to choose from
TINY = 6e-8  # smallest scale (of float16); a group of zeros has it


def group_of(in_features: int, wanted: int | None = None) -> int:
    """The group size for rows of `in_features`: `wanted` (-1: the whole row), or the largest of
    128, 64 and 32 that divides it. Raises UnsupportedFeatureError if it cannot be divided."""
    if wanted == -1:
        return in_features
    for size in GROUPS if wanted is None else (wanted,):
        if size > 0 and in_features % size == 0:
            return size
    raise UnsupportedFeatureError(
        f"A matrix of {in_features} inputs cannot be divided into groups of "
        f"{' or '.join(map(str, GROUPS)) if wanted is None else wanted}."
    )


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


def round_symmetric(
    weight: Tensor, bits: int = 8, group: int = -1, dtype: torch.dtype = torch.float32
) -> Quantized:
    """Quantise [out, in] to signed codes with scales in `dtype`."""
    grouped = weight.float().unflatten(1, (-1, group_of(weight.shape[1], group)))
    most = (1 << (bits - 1)) - 1
    scales = (grouped.abs().amax(-1) / most).clamp(min=TINY).to(dtype)
    codes = (grouped / scales.float()[..., None]).round().clamp(-most, most).flatten(1)
    if bits == 8:
        return Quantized(integer_codes(codes, 8), scales)
    zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.int8)
    return Quantized(integer_codes(codes + (1 << (bits - 1)), bits), scales, zeros)


def round_asymmetric(
    weight: Tensor, bits: int = 4, group: int = 128, dtype: torch.dtype = torch.float16
) -> Quantized:
    """Quantise [out, in] to unsigned codes with zero points. 0 is in the range of each group."""
    return round_to_grid(weight, Grid(bits, False, dtype), group)


SHRINKS = (1.0, 0.95, 0.9, 0.85)  # of a group's range


def round_with_minima(weight: Tensor, group: int, dtype: torch.dtype = torch.float16) -> Quantized:
    """Quantise [out, in] to 4-bit codes: scale * code + minimum. The range of each group is shrunk
    about its middle if that has a smaller squared error."""
    groups = weight.float().unflatten(1, (-1, group_of(weight.shape[1], group)))
    low, high = groups.amin(-1), groups.amax(-1)
    least, found = torch.full_like(low, torch.inf), (groups, low, low)
    for shrink in SHRINKS:
        minimum = ((low + high - (high - low) * shrink) / 2).to(dtype).float()
        scale = ((high - low) * shrink / 15).clamp(min=TINY).to(dtype).float()
        codes = ((groups - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
        error = (codes * scale[..., None] + minimum[..., None] - groups).square().sum(-1)
        better, least = error < least, torch.minimum(error, least)
        found = (
            torch.where(better[..., None], codes, found[0]),
            torch.where(better, scale, found[1]),
            torch.where(better, minimum, found[2]),
        )
    codes, scales, minima = found
    return Quantized(integer_codes(codes.flatten(1), 4), scales.to(dtype), None, minima.to(dtype))
