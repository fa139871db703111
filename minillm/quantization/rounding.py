"""Round-to-nearest quantisation (RTN) while a model is loaded: each group of weights gets a scale,
without other data. `lab/quantise/grid.py` rounds for the files of checkpoint formats.

    8 bits   w' = scale * code,            scale = max |w| / 127, signed codes -127 .. 127
    minima   w' = scale * code + minimum,  scale = (max w - min w) / 15, codes 0 .. 15

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


SHRINKS = (1.0, 0.95, 0.9, 0.85)  # of a group's range


def round_with_minima(weight: Tensor, group: int, dtype: torch.dtype = torch.float16) -> Quantized:
    """Quantise [out, in] to 4-bit codes: scale * code + minimum. The range of each group is shrunk
    about its middle if that has a smaller squared error."""
    groups = weight.float().unflatten(1, (-1, group_of(weight.shape[1], group)))
    low, high = groups.amin(-1), groups.amax(-1)
    least, best = torch.full_like(low, torch.inf), (groups, low, low)
    for shrink in SHRINKS:
        minimum = ((low + high - (high - low) * shrink) / 2).to(dtype).float()
        scale = ((high - low) * shrink / 15).clamp(min=TINY).to(dtype).float()
        codes = ((groups - minimum[..., None]) / scale[..., None]).round().clamp(0, 15)
        error = (codes * scale[..., None] + minimum[..., None] - groups).square().sum(-1)
        better, least = error < least, torch.minimum(error, least)
        best = (
            torch.where(better[..., None], codes, best[0]),
            torch.where(better, scale, best[1]),
            torch.where(better, minimum, best[2]),
        )
    codes, scales, minima = best
    return Quantized(integer_codes(codes.flatten(1), 4), scales.to(dtype), None, minima.to(dtype))
