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
from minillm.layers.linear_methods import PLAIN, TensorSlice, WeightSlice
from minillm.quantization.formats import Headers, Stored, setting
from minillm.quantization.grouping import arranged, groups_of, signed_bits
from minillm.quantization.quantized import Quantized
from minillm.quantization.readers.packed import INDICES, Field, PackedFormat
from minillm.quantization.readers.scales import ScaleBlocks

KINDS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
UNUSED = ("input_scale", "input_zero_point", "output_scale", "k_scale", "v_scale", "q_scale")
CODES = (torch.int8, torch.float8_e4m3fn)
BITS = (2, 4, 8)


class CompressedTensors(PackedFormat):
    """`quant_method: compressed-tensors`. The tensors themselves say how each module is stored."""

    fields: Mapping[str, Field] = {
        "codes": Field("weight_packed", "oi", "i"),
        "scales": Field("weight_scale", "og", dtypes=PLAIN),
        "zeros": Field("weight_zero_point", "og", "o", optional=True),
        "index": Field("weight_g_idx", "i", dtypes=INDICES, optional=True),
    }

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        super().__init__(settings, headers)
        groups = [group for group in setting(settings, "config_groups", dict, {}).values()]
        if any(not isinstance(group, dict) for group in groups):
            raise CheckpointError("quantization_config has config_groups that are not objects.")
        kinds = {str(group.get("format") or settings.get("format")) for group in groups}
        if unknown := kinds - {*KINDS, "None", "dense"}:
            raise UnsupportedFeatureError(
                f"config.json names the compressed-tensors format {sorted(unknown)[0]!r}; this "
                f"version reads {', '.join(KINDS)}."
            )
        self.schemes = [setting(group, "weights", dict, {}) for group in groups]
        self.kinds = sorted(kinds)

    def describe(self) -> str:
        """For example "compressed-tensors pack-quantized, 4 bits"."""
        bits = sorted({str(scheme.get("num_bits", "?")) for scheme in self.schemes})
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
        if self.has(part, "weight_packed"):
            shape = Stored(TensorSlice.whole((2,)), torch.int64)
            return super().packed(part) | {"weight_shape": shape}
        dtype = self.header(part, "weight").dtype
        if dtype not in CODES:
            raise UnsupportedFeatureError(
                f"{part.name}.weight is neither a plain weight nor int8 or float8_e4m3fn codes, "
                "which this version reads."
            )
        slice_of_scales = self.blocks(part).slice
        stored = {
            "weight": Stored(part.slice, dtype),
            "weight_scale": Stored(slice_of_scales, self.scales(part, "weight_scale").dtype),
        }
        if self.has(part, "weight_zero_point"):
            stored["weight_zero_point"] = Stored(slice_of_scales, torch.int8)
        if self.has(part, "weight_g_idx"):
            columns = slice(part.columns.start, part.columns.stop)
            stored["weight_g_idx"] = Stored(TensorSlice(part.shape[1:], (columns,)), torch.int32)
        return stored

    def decode_packed(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Codes with a scale, and a zero point, for each row and group of columns."""
        if "weight_packed" not in tensors:
            return self.decode_plain(part, tensors)
        if tensors["weight_shape"].tolist() != list(part.shape):
            raise CheckpointError(
                f"{part.name}.weight_shape says {tensors['weight_shape'].tolist()}; config.json "
                f"describes {list(part.shape)}."
            )
        return super().decode_packed(part, tensors)

    def decode_plain(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Codes in a byte each, which are signed and usually have no zero points."""
        blocks = self.blocks(part)
        scales, index = blocks.by_row(tensors["weight_scale"])
        zeros = tensors.get("weight_zero_point")
        if zeros is not None:
            zeros = blocks.by_row(zeros)[0]
        if "weight_g_idx" in tensors:
            index = self.groups(part).index(tensors["weight_g_idx"])
        return arranged(index, scales, zeros, tensors["weight"], signed_bits)

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

    def is_reordered(self, part: WeightSlice) -> bool:
        """Whether the file has the group of each input."""
        return self.has(part, "weight_g_idx")

    def blocks(self, part: WeightSlice) -> ScaleBlocks:
        """What a scale of a format with a code per byte stands for."""
        shape = self.scales(part, "weight_scale").shape
        if len(shape) == 2 and shape[0] == part.shape[0]:
            return ScaleBlocks(part, shape, (1, groups_of(part, shape[1]).size))
        block = next((scheme["block_structure"] for scheme in self.schemes
                      if isinstance(scheme.get("block_structure"), list)), (128, 128))  # fmt: skip
        if len(block) != 2 or any(type(side) is not int or side < 1 for side in block):
            raise CheckpointError(
                f"quantization_config gives block_structure as {block!r}; it is two sizes."
            )
        return ScaleBlocks(part, shape, (block[0], block[1]))
