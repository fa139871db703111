"""Round-to-nearest quantisation (RTN): each group of weights gets a scale, without other data.

    symmetric   s = max |w| / (2^(b-1) - 1)       codes -(2^(b-1) - 1) .. 2^(b-1) - 1
    asymmetric  s = (max w - min w) / (2^b - 1)   codes 0 .. 2^b - 1, zero = round(-min w / s)

Codes are computed with the scale as it is stored, so that rounding the scale costs no extra error.
"""

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
    grouped = weight.float().unflatten(1, (-1, group_of(weight.shape[1], group)))
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    most = (1 << bits) - 1
    scales = ((high - low) / most).clamp(min=TINY).to(dtype)
    step = scales.float()
    zeros = (-low / step).round().clamp(0, most)
    codes = ((grouped / step[..., None]).round() + zeros[..., None]).clamp(0, most).flatten(1)
    if bits == 8:
        return Quantized(integer_codes(codes - 128, 8), scales, (zeros - 128).to(torch.int8))
    return Quantized(integer_codes(codes, bits), scales, zeros.to(torch.int8))
