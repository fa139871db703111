"""GGUF as a checkpoint format: each quantised matrix is one tensor of blocks."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.gguf.types import TYPES
from minillm.layers.linear_methods import TensorSlice, WeightSlice
from minillm.quantization.formats import Format, Stored, units
from minillm.quantization.gguf.blocks import DECODERS
from minillm.quantization.quantized import Quantized

BY_SUFFIX: Mapping[str, int] = {
    kind.name.lower(): kind.weights for kind in TYPES.values() if not kind.is_plain
}


class GGUF(Format):
    """`quant_method: gguf`. The type of each matrix is the suffix of its tensor's name."""

    @property
    def promises_codes(self) -> bool:
        """No: all matrices of a GGUF file may be F16."""
        return False

    def describe(self) -> str:
        """For example "GGUF, 12 matrices in Q4_K, 3 in Q6_K"."""
        suffixes = Counter(name.rpartition(".")[2] for name in self.headers)
        found = {name: count for name, count in suffixes.most_common() if name in BY_SUFFIX}
        counts = [f"{count} in {name.upper()}" for name, count in found.items()]
        return f"GGUF, matrices: {', '.join(counts)}"

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """The blocks, cut along the rows, and between blocks along the columns."""
        kind = self.kind(part)
        unit, size = BY_SUFFIX[kind], self.header(part, kind).shape[-1]
        out, width = part.shape
        blocks = units(part, part.columns, width, unit)
        index = slice(part.rows.start, part.rows.stop), blocks, slice(0, size)
        return {kind: Stored(TensorSlice((out, -(-width // unit), size), index), torch.uint8)}

    def decode_packed(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized:
        """The codes, scales and offsets of the blocks."""
        kind = self.kind(part)
        return DECODERS[kind.upper()](tensors[kind])

    def kind(self, part: WeightSlice) -> str:
        """The type of a matrix. Raises CheckpointError if the file does not have it."""
        kinds = [kind for kind in BY_SUFFIX if self.has(part, kind)]
        if not kinds:
            raise CheckpointError(f"The GGUF file has no tensor for {part.name}.")
        return kinds[0]
