"""The formats of compressed-tensors, which llmcompressor writes and vLLM and transformers read.

| format | tensors of a module |
|---|---|
| pack-quantized | `weight_packed` int32 [out, in x bits / 32], codes + 2^(bits - 1) |
| int-quantized | `weight` int8 [out, in]; activations are int8 per token |
| float-quantized | `weight` float8_e4m3fn [out, in] |
| naive-quantized | `weight` int8 or float8_e4m3fn |

All have `weight_scale`: [1], [out, 1], [out, in / group] or blocks [out / 128, in / 128]; and
`weight_zero_point` if they are asymmetric, packed along `out` in pack-quantized. `weight_g_idx`
int32 [in] is the group of each input where act order has changed it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import CheckpointError, UnsupportedFeatureError
from minillm.layers.linear_methods import TensorSlice, WeightSlice
from minillm.quantization.formats import Format, Headers, Stored, cut, setting, units
from minillm.quantization.grouping import (
    Groups,
    arranged,
    eight_bits,
    few_bits,
    groups_of,
    signed_bits,
)
from minillm.quantization.integers import unpack_words
from minillm.quantization.quantized import Quantized
from minillm.quantization.readers.scales import ScaleBlocks

KINDS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")
CODES = (torch.int8, torch.float8_e4m3fn)
BITS = (2, 4, 8)


class CompressedTensors(Format):
    """`quant_method: compressed-tensors`. The tensors themselves say how each module is stored."""

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        super().__init__(settings, headers)
        groups = [each for each in setting(settings, "config_groups", dict, {}).values()]
        if any(not isinstance(each, dict) for each in groups):
            raise CheckpointError("quantization_config has config_groups that are not objects.")
        kinds = {str(each.get("format") or settings.get("format")) for each in groups}
        if unknown := kinds - {*KINDS, "None", "dense"}:
            raise UnsupportedFeatureError(
                f"config.json names the compressed-tensors format {sorted(unknown)[0]!r}; this "
                f"version reads {', '.join(KINDS)}."
            )
        self.schemes = [setting(each, "weights", dict, {}) for each in groups]
        self.kinds = sorted(kinds)

    def describe(self) -> str:
        """For example "compressed-tensors pack-quantized, 4 bits"."""
        bits = sorted({str(each.get("num_bits", "?")) for each in self.schemes})
        return f"compressed-tensors {' and '.join(self.kinds)}, {' and '.join(bits)} bits"

    @property
    def promises_codes(self) -> bool:
        """Not if only the KV cache is quantised."""
        return any(self.schemes)

    def is_unused(self, name: str) -> bool:
        """Scales of activations and of an FP8 KV cache."""
        return name.rpartition(".")[2] in UNUSED

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """Codes, scales, and zero points or an input order where the file has them."""
        is_packed = self.has(part, "weight_packed")
        found = self.packed_words(part) if is_packed else self.plain_codes(part)
        if self.has(part, "weight_g_idx"):
            columns = slice(part.columns.start, part.columns.stop)
            found["weight_g_idx"] = Stored(TensorSlice(part.shape[1:], (columns,)), torch.int32)
        return found

    def packed_words(self, part: WeightSlice) -> dict[str, Stored]:
        """The tensors of pack-quantized."""
        step, groups = 32 // self.bits(part), self.groups(part)
        rows = slice(part.rows.start, part.rows.stop)
        words = units(part, part.rows, part.shape[0], step)
        found = {
            "weight_packed": Stored(cut(part, 1, step), torch.int32),
            "weight_shape": Stored(TensorSlice.whole((2,)), torch.int64),
            "weight_scale": Stored(
                TensorSlice((part.shape[0], groups.count), (rows, groups.held)),
                self.scales(part, "weight_scale").dtype,
            ),
        }
        if self.has(part, "weight_zero_point"):
            shape = -(-part.shape[0] // step), groups.count
            zeros = TensorSlice(shape, (words, groups.held))
            found["weight_zero_point"] = Stored(zeros, torch.int32)
        return found

    def plain_codes(self, part: WeightSlice) -> dict[str, Stored]:
        """The tensors of the formats with a code per byte."""
        dtype = self.header(part, "weight").dtype
        if dtype not in CODES:
            raise UnsupportedFeatureError(
                f"{part.name}.weight is neither a plain weight nor int8 or float8_e4m3fn codes, "
                "which this version reads."
            )
        slice_of_scales = self.blocks(part).slice
        found = {
            "weight": Stored(part.slice, dtype),
            "weight_scale": Stored(slice_of_scales, self.scales(part, "weight_scale").dtype),
        }
        if self.has(part, "weight_zero_point"):
            found["weight_zero_point"] = Stored(slice_of_scales, torch.int8)
        return found

    def decode_packed(self, part: WeightSlice, found: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Codes with a scale, and a zero point, for each row and group of columns."""
        order = found.get("weight_g_idx")
        if "weight_packed" not in found:
            return self.decode_plain(part, found, order)
        if found["weight_shape"].tolist() != list(part.shape):
            raise CheckpointError(
                f"{part.name}.weight_shape says {found['weight_shape'].tolist()}; config.json "
                f"describes {list(part.shape)}."
            )
        bits, scales = self.bits(part), found["weight_scale"]
        codes = unpack_words(found["weight_packed"], bits)[:, : len(part.columns)]
        if "weight_zero_point" in found:
            words = found["weight_zero_point"].T.contiguous()
            zeros = unpack_words(words, bits).T[: len(part.rows)].contiguous()
        else:
            zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
        store = eight_bits if bits == 8 else few_bits
        return arranged(self.groups(part).index(order), scales, zeros, codes, store)

    def decode_plain(
        self, part: WeightSlice, found: Mapping[str, Tensor], order: Tensor | None
    ) -> Quantized | Tensor:
        """Codes in a byte each, which are signed and usually have no zero points."""
        blocks = self.blocks(part)
        scales, index = blocks.by_row(found["weight_scale"])
        zeros = found.get("weight_zero_point")
        if zeros is not None:
            zeros = blocks.by_row(zeros)[0]
        if order is not None:
            index = self.groups(part).index(order)
        return arranged(index, scales, zeros, found["weight"], signed_bits)

    def bits(self, part: WeightSlice) -> int:
        """Bits of a code, from the width of the packed tensor."""
        shape, width = self.header(part, "weight_packed").shape, part.shape[1]
        for bits in BITS:
            if len(shape) == 2 and shape[1] == -(-width * bits // 32):
                return bits
        raise UnsupportedFeatureError(
            f"{part.name}.weight_packed has shape {list(shape)} for {width} inputs; this version "
            "reads codes of 2, 4 and 8 bits."
        )

    def groups(self, part: WeightSlice) -> Groups:
        """The groups of a part: all for the rank that holds some columns of an act order."""
        shape = self.scales(part, "weight_scale").shape
        ordered = self.has(part, "weight_g_idx") and len(part.columns) < part.shape[1]
        return groups_of(part, shape[1] if len(shape) == 2 else 1, ordered)

    def blocks(self, part: WeightSlice) -> ScaleBlocks:
        """What a scale of a format with a code per byte stands for."""
        shape = self.scales(part, "weight_scale").shape
        if len(shape) == 2 and shape[0] == part.shape[0]:
            return ScaleBlocks(part, shape, (1, groups_of(part, shape[1]).size))
        block = next((each["block_structure"] for each in self.schemes
                      if isinstance(each.get("block_structure"), list)), (128, 128))  # fmt: skip
        if len(block) != 2 or any(type(each) is not int or each < 1 for each in block):
            raise CheckpointError(
                f"quantization_config gives block_structure as {block!r}; it is two sizes."
            )
        return ScaleBlocks(part, shape, (block[0], block[1]))
