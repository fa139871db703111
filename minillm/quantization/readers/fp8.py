"""FP8 checkpoints: e4m3 weights with float scales, as DeepSeek-V3 and transformers store them.

| tensor of a module | type and shape | contents |
|---|---|---|
| `weight` | float8_e4m3fn [out, in] | w = weight x scale |
| `weight_scale_inv` | float [out / 128, in / 128] | the scale of each block, despite its name |
| `weight_scale` | float [], [1], [out] or [out, 1] | the scale of the matrix, or of each row |
| `input_scale` | float | activations, with `activation_scheme` static; not used |

The last blocks of a side may be incomplete. Activations stay in 16 bits here, so `input_scale` is
read and left out.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import CheckpointError, UnsupportedFeatureError
from minillm.layers.linear_methods import WeightSlice
from minillm.quantization.formats import Format, Headers, Stored
from minillm.quantization.grouping import arranged, signed_bits
from minillm.quantization.quantized import Quantized
from minillm.quantization.readers.scales import ScaleBlocks

SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale", "activation_scale", "k_scale", "v_scale")
BLOCK = (128, 128)


class FP8(Format):
    """`quant_method: fp8`."""

    def __init__(self, settings: Mapping[str, Any], headers: Headers):
        super().__init__(settings, headers)
        block = settings.get("weight_block_size") or BLOCK
        integers = isinstance(block, list | tuple) and all(type(side) is int for side in block)
        if not integers or len(block) != 2 or min(block) < 1:
            raise CheckpointError(
                f"quantization_config gives weight_block_size as {block!r}; it is two sizes."
            )
        self.block = block[0], block[1]

    def describe(self) -> str:
        """For example "FP8 e4m3, blocks of 128 x 128"."""
        blocks = f", blocks of {self.block[0]} x {self.block[1]}"
        text = "FP8 e4m3" + blocks * bool(self.settings.get("weight_block_size"))
        if self.settings.get("activation_scheme") == "static":
            text += ", activations in 16 bits (input_scale is not used)"
        return text

    def is_unused(self, name: str) -> bool:
        """Scales of activations and of an FP8 KV cache."""
        return name.rpartition(".")[2] in UNUSED

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """The codes, and the scales in one of their forms."""
        if self.header(part, "weight").dtype != torch.float8_e4m3fn:
            raise UnsupportedFeatureError(
                f"{part.name}.weight is neither a plain weight nor float8_e4m3fn, the only FP8 "
                "type that this version reads."
            )
        blocks = self.blocks(part)
        return {
            "weight": Stored(part.slice, torch.float8_e4m3fn),
            self.suffix(part): Stored(blocks.slice, self.scales(part, self.suffix(part)).dtype),
        }

    def decode_packed(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """A scale for each row and group of columns."""
        scales, index = self.blocks(part).by_row(tensors[self.suffix(part)])
        return arranged(index, scales, None, tensors["weight"], signed_bits)

    def suffix(self, part: WeightSlice) -> str:
        """The name of the scales."""
        return next((name for name in SCALES if self.has(part, name)), SCALES[0])

    def blocks(self, part: WeightSlice) -> ScaleBlocks:
        """What a scale stands for."""
        return ScaleBlocks(part, self.scales(part, self.suffix(part)).shape, self.block)
