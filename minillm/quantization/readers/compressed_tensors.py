"""The formats of compressed-tensors, which llmcompressor writes and vLLM and transformers read.

| format | tensors of a module |
|---|---|
| pack-quantized | `weight_packed` int32 [out, in x bits / 32], codes + 2^(bits - 1) |
| int-quantized | `weight` int8 [out, in]; activations are int8 per token |
| float-quantized | `weight` float8_e4m3fn [out, in] |
| naive-quantized | `weight` int8 or float8_e4m3fn |

All have `weight_scale`: [1], [out, 1], [out, in / group] or blocks [out / 128, in / 128]; and
`weight_zero_point` if they are asymmetric, packed along `out` in pack-quantized.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import UnsupportedFeatureError
from minillm.layers.linear_methods import TensorSlice, WeightSlice
from minillm.quantization.formats import Format, Headers, Stored, cut, units
from minillm.quantization.integers import unpack_words
from minillm.quantization.quantized import Quantized, integer_codes

KINDS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class CompressedTensors(Format):
    """`quant_method: compressed-tensors`. The tensors themselves say how each module is stored."""

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        super().__init__(settings, headers)
        groups = settings.get("config_groups") or {}
        kinds = {str(each.get("format") or settings.get("format")) for each in groups.values()}
        if unknown := kinds - {*KINDS, "None", "dense"}:
            raise UnsupportedFeatureError(
                f"config.json names the compressed-tensors format {sorted(unknown)[0]!r}; this "
                f"version reads {', '.join(KINDS)}."
            )
        self.schemes = [each.get("weights") or {} for each in groups.values()]
        self.kinds = sorted(kinds)

    def describe(self) -> str:
        """For example "compressed-tensors pack-quantized, 4 bits"."""
        bits = sorted({str(each.get("num_bits", "?")) for each in self.schemes})
        return f"compressed-tensors {' and '.join(self.kinds)}, {' and '.join(bits)} bits"

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """Codes, scales, and zero points or an input order where the file has them."""
        if not self.has(part, "weight_packed"):
            codes = self.header(part, "weight").dtype
            found = {"weight": Stored(part.slice, codes)}
        else:
            step = 32 // self.bits(part)
            found = {
                "weight_packed": Stored(cut(part, 1, step), torch.int32),
                "weight_shape": Stored(TensorSlice.whole((2,)), torch.int64),
            }
            if self.has(part, "weight_zero_point"):
                group = self.group(part)
                found["weight_zero_point"] = Stored(cut(part, step, group), torch.int32)
        scale = self.header(part, "weight_scale")
        found["weight_scale"] = Stored(scale_slice(part, scale.shape), scale.dtype)
        if self.has(part, "weight_g_idx"):
            raise UnsupportedFeatureError(
                f"{part.name} has its inputs in another order (weight_g_idx), which this version "
                "cannot load; use a checkpoint without act order."
            )
        return found

    def decode_packed(self, part: WeightSlice, found: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Signed codes have no zero point; unsigned 4-bit codes have 8 or the stored one."""
        rows = len(part.rows)
        if "weight_packed" not in found:
            return Quantized(found["weight"], row_scales(part, found["weight_scale"]))
        bits, scales = self.bits(part), found["weight_scale"]
        codes = unpack_words(found["weight_packed"], bits)[:, : len(part.columns)]
        half = 1 << (bits - 1)
        if "weight_zero_point" in found:
            zeros = unpack_words(found["weight_zero_point"].T.contiguous(), bits).T[:rows]
        else:
            zeros = torch.full_like(scales, half, dtype=torch.uint8)
        return affine(codes, zeros, scales, bits)

    def bits(self, part: WeightSlice) -> int:
        """Bits of a code, from the width of the packed tensor."""
        bits = 32 * self.header(part, "weight_packed").shape[-1] // part.shape[1]
        if bits not in (4, 8):
            raise UnsupportedFeatureError(
                f"{part.name} has {bits} bits; this version reads 4 and 8."
            )
        return bits

    def group(self, part: WeightSlice) -> int:
        """Columns that share a scale."""
        return part.shape[1] // self.header(part, "weight_scale").shape[-1]


def affine(codes: Tensor, zeros: Tensor, scales: Tensor, bits: int) -> Quantized:
    """Unsigned codes [out, in] with zero points [out, groups], in the resident form: 4 bits stay
    unsigned; 8 bits become signed, which needs no zero point if it is 128 everywhere."""
    if bits == 4:
        return Quantized(integer_codes(codes, 4), scales, zeros.to(torch.int8))
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    offsets = (zeros.to(torch.int16) - 128).to(torch.int8)
    return Quantized(signed, scales, offsets if offsets.any() else None)


def scale_slice(part: WeightSlice, shape: tuple[int, ...]) -> TensorSlice:
    """The held part of scales of shape [1], [out, 1], [out, groups] or [out / b, in / b]."""
    if shape in ((), (1,)):
        return TensorSlice.whole(shape)
    if shape[1] == 1:  # one scale per row: equal on all ranks that hold columns of it
        side = block_side(part.shape[0], shape[0])
        return TensorSlice(shape, (units(part, part.rows, part.shape[0], side), slice(0, 1)))
    return cut(part, block_side(part.shape[0], shape[0]), block_side(part.shape[1], shape[1]))


def block_side(total: int, count: int) -> int:
    """Rows or columns of a block, of which the last may be incomplete: 128, or what divides."""
    return total // count if total % count == 0 else 128


def row_scales(part: WeightSlice, scales: Tensor) -> Tensor:
    """Scales [out, groups] for a scale per matrix, row, group or block."""
    rows = len(part.rows)
    if scales.ndim < 2:
        return scales.reshape(1, 1).expand(rows, 1).contiguous()
    side = block_side(part.shape[0], -(-part.shape[0] * len(scales) // rows))
    if len(scales) == rows:
        return scales
    return scales.repeat_interleave(side, 0)[:rows].contiguous()
