"""bitsandbytes checkpoints: NF4 and FP4 (Dettmers et al., 2023) and LLM.int8() (2022).

| 4 bits: tensor of a module | type and shape | contents |
|---|---|---|
| `weight` | uint8 [out x in / 2, 1] | codes row by row, the first in the high half of a byte |
| `weight.absmax` | float32 [blocks] | largest magnitude of each block of (usually) 64 weights |
| `weight.quant_map` | float32 [16] | the value of each code |
| `weight.quant_state.bitsandbytes__nf4` | uint8 | JSON: block size, shape, type |

With double quantisation `absmax` is uint8: `nested_quant_map[code] x nested_absmax + offset`, one
`nested_absmax` for 256 blocks. Blocks are counted through the flattened matrix. If they cross rows,
the matrix is made dense when it is loaded. A rank that holds some columns reads whole rows.

| 8 bits | type and shape | contents |
|---|---|---|
| `weight` | int8 [out, in] | w = code x SCB / 127 |
| `SCB` | float32 [out] | largest magnitude of each row |
| `weight_format` | uint8 | 0: row by row |

Products that round inputs to 8 bits (C panels) leave inputs from `llm_int8_threshold` on in 16 bits
(`outliers.py`). All other products have the dequantised weight and inputs in 16 bits, which is more
exact than LLM.int8().
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minillm.errors import CheckpointError, UnsupportedFeatureError
from minillm.layers.linear_methods import TensorSlice, WeightSlice
from minillm.quantization.formats import Format, Stored
from minillm.quantization.outliers import THRESHOLD
from minillm.quantization.quantized import Quantized

STATE = "weight.quant_state.bitsandbytes__"
KINDS = ("nf4", "fp4")
BLOCKS = (64, 32, 128, 256, 512, 1024, 2048, 4096)
NESTED = ("nested_absmax", "nested_quant_map")


class BitsAndBytes(Format):
    """`quant_method: bitsandbytes`."""

    def describe(self) -> str:
        """For example "bitsandbytes NF4, double quantisation"."""
        if self.is_eight_bits:
            return "bitsandbytes LLM.int8()"
        kind = str(self.settings.get("bnb_4bit_quant_type") or "fp4").upper()
        twice = ", double quantisation" * bool(self.settings.get("bnb_4bit_use_double_quant"))
        return f"bitsandbytes {kind}{twice}"

    @property
    def threshold(self) -> float:
        """`llm_int8_threshold` of 8-bit codes, by default 6."""
        if not self.is_eight_bits:
            return 0.0
        limit = self.settings.get("llm_int8_threshold", THRESHOLD)
        if not isinstance(limit, int | float) or not 0 <= limit < math.inf:
            raise CheckpointError(
                f"quantization_config gives llm_int8_threshold as {limit!r}; it is a number from 0 "
                "on."
            )
        return float(limit)

    @property
    def is_eight_bits(self) -> bool:
        """Whether the codes have 8 bits."""
        return bool(self.settings.get("load_in_8bit") or self.settings.get("_load_in_8bit"))

    def is_plain(self, part: WeightSlice) -> bool:
        """Codes may be stored in a floating-point type, so its type alone does not tell."""
        return super().is_plain(part) and not self.has(part, "weight.absmax")

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """The tensors of 4-bit or 8-bit codes."""
        dtype = self.header(part, "weight").dtype
        if self.has(part, "SCB"):
            stored = {
                "weight": Stored(part.slice, torch.int8),
                "SCB": Stored(part.slice_of_rows, torch.float32),
            }
            if self.has(part, "weight_format"):
                stored["weight_format"] = self.whole(part, "weight_format", torch.uint8)
            return stored
        if dtype != torch.uint8:
            raise UnsupportedFeatureError(
                f"{part.name} is stored with bnb_4bit_quant_storage {str(dtype)[6:]}; this version "
                "reads uint8."
            )
        return self.packed_four(part)

    def packed_four(self, part: WeightSlice) -> dict[str, Stored]:
        """The tensors of 4-bit codes: the held rows, or everything if blocks cross rows."""
        out, width = part.shape
        first, stop = self.held(part)
        block = self.block(part)
        absmax = self.header(part, "weight.absmax")
        count = absmax.shape[0]
        codes = slice(first * width // 2, -(-stop * width // 2))
        blocks = slice(first * width // block, -(-stop * width // block))
        packed = TensorSlice((-(-out * width // 2), 1), (codes, slice(0, 1)))
        stored = {
            "weight": Stored(packed, torch.uint8),
            "weight.absmax": Stored(TensorSlice((count,), (blocks,)), absmax.dtype),
            "weight.quant_map": Stored(TensorSlice.whole((16,)), torch.float32),
            self.state(part): self.whole(part, self.state(part), torch.uint8),
        }
        if absmax.dtype == torch.uint8:
            for name in NESTED:
                stored[f"weight.{name}"] = self.whole(part, f"weight.{name}", torch.float32)
        elif absmax.dtype != torch.float32:
            raise CheckpointError(
                f"{part.name}.weight.absmax is stored as {str(absmax.dtype)[6:]}; it is float32, "
                "or uint8 with double quantisation."
            )
        return stored

    def decode_packed(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Scales are computed in float32 as bitsandbytes does, bit for bit."""
        if "SCB" in tensors:
            if "weight_format" in tensors and bool(tensors["weight_format"].any()):
                raise UnsupportedFeatureError(
                    f"{part.name} has its 8-bit codes in tiles of a GPU (weight_format "
                    f"{int(tensors['weight_format'].flatten()[0])}); save it row by row."
                )
            return Quantized(tensors["weight"], (tensors["SCB"] / 127)[:, None])
        state = read_state(part, tensors[self.state(part)])
        width, block = part.shape[1], self.block(part)
        first, stop = self.held(part)
        absmax = self.absmax(part, tensors, state, first * width // block)
        check_state(part, state, self.header(part, "weight.absmax").shape[0], self.state(part))
        codes, table = tensors["weight"].flatten(), tensors["weight.quant_map"]
        columns = slice(part.columns.start, part.columns.stop)
        if width % block:
            return crossing(codes, absmax, table, part.shape, block)[
                part.rows.start : part.rows.stop, columns
            ]
        swapped = ((codes >> 4) | (codes << 4)).view(stop - first, width // 2)
        whole = Quantized(swapped, absmax.view(stop - first, -1), table=table)
        if len(part.columns) == width:
            return whole
        if columns.start % block or columns.stop % block:
            return whole.dense()[:, columns]
        halves = slice(columns.start // 2, columns.stop // 2)
        groups = slice(columns.start // block, columns.stop // block)
        kept = whole.codes[:, halves].contiguous(), whole.scales[:, groups].contiguous()
        return Quantized(*kept, table=table)

    def absmax(
        self, part: WeightSlice, tensors: Mapping[str, Tensor], state: Mapping[str, Any], start: int
    ) -> Tensor:
        """The scale of each held block, of which the first is block `start` of the matrix."""
        stored = tensors["weight.absmax"]
        if stored.dtype != torch.uint8:
            return stored
        size, offset = state.get("nested_blocksize"), state.get("nested_offset")
        count = self.header(part, "weight.absmax").shape[0]
        nested, levels = (tensors[f"weight.{name}"].flatten() for name in NESTED)
        block = size if isinstance(size, int) and size > 0 else count + 1
        sizes = len(levels), len(nested)
        if sizes != (256, -(-count // block)) or not isinstance(offset, int | float):
            raise CheckpointError(
                f"{part.name} has scales of scales that do not fit: {len(nested)} of them and "
                f"{len(levels)} levels for {count} blocks, nested_blocksize {size!r}, "
                f"nested_offset {offset!r}."
            )
        which = torch.arange(start, start + len(stored), device=stored.device) // block
        return levels[stored.long()] * nested[which] + torch.tensor(offset, dtype=torch.float32)

    def held(self, part: WeightSlice) -> tuple[int, int]:
        """The first row that is read, and the one after the last."""
        if part.shape[1] % self.block(part):
            return 0, part.shape[0]
        return part.rows.start, part.rows.stop

    def block(self, part: WeightSlice) -> int:
        """Weights of a block, from the number of blocks."""
        size, shape = part.shape[0] * part.shape[1], self.header(part, "weight.absmax").shape
        for block in BLOCKS:
            if shape == (-(-size // block),):
                return block
        raise CheckpointError(
            f"{part.name}.weight.absmax has shape {list(shape)}, which no block size from 32 to "
            f"4096 gives for {size:,} weights."
        )

    def state(self, part: WeightSlice) -> str:
        """The suffix of the JSON tensor, which ends in the type of the codes."""
        for kind in KINDS:
            if self.has(part, f"{STATE}{kind}"):
                return f"{STATE}{kind}"
        self.header(part, f"{STATE}{KINDS[0]}")  # raises
        return ""

    def whole(self, part: WeightSlice, suffix: str, dtype: torch.dtype) -> Stored:
        """A whole tensor of the file."""
        return Stored(TensorSlice.whole(self.header(part, suffix).shape), dtype)


def read_state(part: WeightSlice, stored: Tensor) -> Mapping[str, Any]:
    """The JSON of a module. Raises CheckpointError if it is not an object."""
    try:
        state = json.loads(bytes(stored.flatten().tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, dict):
        raise CheckpointError(f"{part.name} has a quant_state that is not a JSON object.")
    return state


def check_state(part: WeightSlice, state: Mapping[str, Any], count: int, name: str) -> None:
    """Check that the JSON of a module describes its tensors."""
    block, shape, kind = state.get("blocksize"), state.get("shape"), state.get("quant_type")
    size = part.shape[0] * part.shape[1]
    fits = isinstance(block, int) and block > 0 and -(-size // block) == count
    if not fits or shape != list(part.shape) or not name.endswith(f"__{kind}"):
        raise CheckpointError(
            f"{part.name} has a quant_state with shape {shape}, blocksize {block} and quant_type "
            f"{kind}, which does not fit {list(part.shape)} in {count} blocks."
        )


def crossing(
    codes: Tensor, absmax: Tensor, table: Tensor, shape: tuple[int, int], block: int
) -> Tensor:
    """The values [out, in] of a matrix whose blocks cross rows."""
    size = shape[0] * shape[1]
    numbers = torch.stack((codes >> 4, codes & 15), dim=-1).flatten()[:size]
    scales = absmax.repeat_interleave(block)[:size]
    return (table[numbers.long()] * scales).view(shape)
