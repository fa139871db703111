"""Quantises rows into GGUF's blocks of 32 weights, rounding as ggml's `quantize_row_*_ref` does.

Scales are computed in float32 and stored in float16; codes are rounded with the scale before that.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError

BLOCK = 32


def inverse(d: Tensor) -> Tensor:
    """1 / d, and 0 for 0"""
    return torch.where(d == 0, 0, 1 / d)


def half(values: Tensor) -> Tensor:
    """Scales [n, 1] as float16, uint8 [n, 2]"""
    return values.to(torch.float16).view(torch.uint8)


def nibbles(codes: Tensor) -> Tensor:
    """[n, 32] -> [n, 16]: element j in the low half of byte j, element j + 16 in the high half"""
    return (codes[:, :16] & 15) | (codes[:, 16:] & 15) << 4


def fifths(codes: Tensor) -> Tensor:
    """[n, 32] -> [n, 4]: the fifth bit of element j in bit j of a little-endian word"""
    bits = (codes >> 4).unflatten(1, (4, 8)) << torch.arange(8, dtype=torch.uint8)
    return bits.sum(2, dtype=torch.uint8)


def signed_extreme(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scales and codes of Q4_0 and Q5_0: d = (entry with the largest |x|) / -levels"""
    d = x.gather(1, x.abs().argmax(1, keepdim=True)) / -levels
    codes = (x * inverse(d) + (levels + 0.5)).trunc().clamp(0, 2 * levels - 1)
    return d, codes.to(torch.uint8)


def smallest(x: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scales, minima and codes of Q4_1 and Q5_1: d = (max - min) / levels"""
    low = x.amin(1, keepdim=True)
    d = (x.amax(1, keepdim=True) - low) / levels
    return d, low, ((x - low) * inverse(d) + 0.5).trunc().clamp(0, levels).to(torch.uint8)


def q4_0(x: Tensor) -> Tensor:
    """d, nibbles"""
    d, codes = signed_extreme(x, 8)
    return torch.cat((half(d), nibbles(codes)), 1)


def q4_1(x: Tensor) -> Tensor:
    """d, m, nibbles"""
    d, low, codes = smallest(x, 15)
    return torch.cat((half(d), half(low), nibbles(codes)), 1)


def q5_0(x: Tensor) -> Tensor:
    """d, fifth bits, nibbles"""
    d, codes = signed_extreme(x, 16)
    return torch.cat((half(d), fifths(codes), nibbles(codes)), 1)


def q5_1(x: Tensor) -> Tensor:
    """d, m, fifth bits, nibbles"""
    d, low, codes = smallest(x, 31)
    return torch.cat((half(d), half(low), fifths(codes), nibbles(codes)), 1)


def q8_0(x: Tensor) -> Tensor:
    """d = max |x| / 127, signed codes, rounded half away from zero"""
    d = x.abs().amax(1, keepdim=True) / 127
    scaled = x * inverse(d)
    whole = scaled.abs().floor()
    codes = whole + (2 * (scaled.abs() - whole)).floor()
    return torch.cat((half(d), (codes * scaled.sign()).to(torch.int8).view(torch.uint8)), 1)


ENCODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0}
)
PLAIN: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
)


def encoded(name: str, values: Tensor, kind: str) -> bytes:
    """The bytes of a tensor [.., in] in type `kind`.

    Raises:
        UnsupportedFeatureError: a value is not finite, or too large for float16.
    """
    if kind in PLAIN:
        stored = values.to(PLAIN[kind])
        finite = stored
    else:
        stored = ENCODERS[kind](values.float().reshape(-1, BLOCK))
        heads = 4 if kind.endswith("_1") else 2
        finite = stored[:, :heads].contiguous().view(torch.float16)
    if not (torch.isfinite(values).all() and torch.isfinite(finite).all()):
        raise UnsupportedFeatureError(
            f"{name} has values that are not finite or too large for {kind}; choose BF16."
        )
    return stored.contiguous().view(torch.uint8).numpy().tobytes()
