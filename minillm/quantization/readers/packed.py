"""Formats that pack integers into 32-bit words.

Each is a table of `Field`s, from which its tensors are read, written, and planned.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.layers.linear_methods import TensorSlice, WeightSlice
from minillm.quantization.formats import Format, Stored, units
from minillm.quantization.grouping import Groups, arranged, eight_bits, few_bits, groups_of
from minillm.quantization.quantized import Quantized

WORDS, INDICES = (torch.int32,), (torch.int32, torch.int64)


@dataclass(frozen=True)
class Field:
    """A tensor of a quantised matrix.

    `sides` has a letter for each dimension: "o" outputs, "i" inputs, "g" groups of inputs. Along
    the side `packed` an int32 has 32 / bits numbers, the first in the lowest bits, or number j at
    place `order[j]`. A file may lack a tensor that is `optional`.
    """

    suffix: str
    sides: str
    packed: str = ""
    order: Sequence[int] | None = None
    dtypes: tuple[torch.dtype, ...] = WORDS
    optional: bool = False

    def slice(self, part: WeightSlice, groups: Groups, bits: int) -> TensorSlice:
        """The slice of the tensor that belongs to a part. Raises CheckpointError if the held rows
        or columns begin or end within a word."""
        ranges = {
            "o": (part.rows, part.shape[0]),
            "i": (part.columns, part.shape[1]),
            "g": (range(groups.held.start, groups.held.stop), groups.count),
        }
        steps = [32 // bits if side == self.packed else 1 for side in self.sides]
        sides = [(*ranges[side], step) for side, step in zip(self.sides, steps, strict=True)]
        return TensorSlice(
            tuple(-(-total // step) for _, total, step in sides),
            tuple(units(part, held, total, step) for held, total, step in sides),
        )

    def read(self, stored: Tensor, part: WeightSlice, bits: int) -> Tensor:
        """The numbers of a part, outputs first."""
        if self.packed:
            count = len(part.rows if self.packed == "o" else part.columns)
            words = self._packed_last(stored).contiguous()
            stored = self._packed_last(unpack_words(words, bits, self.order)[:, :count])
        return self._outputs_first(stored).contiguous()

    def write(self, numbers: Tensor, bits: int) -> Tensor:
        """The inverse of `read`. The last word is filled with 0."""
        stored = self._outputs_first(numbers)
        if self.packed:
            stored = self._packed_last(stored)
            stored = F.pad(stored, (0, -stored.shape[1] % (32 // bits)))
            stored = self._packed_last(pack_words(stored, bits, self.order))
        return stored.contiguous()

    def _packed_last(self, tensor: Tensor) -> Tensor:
        """The packed side last; twice: as it was."""
        return tensor if self.sides[1] == self.packed else tensor.T

    def _outputs_first(self, tensor: Tensor) -> Tensor:
        """The outputs first; twice: as it was."""
        return tensor if self.sides[0] == "o" or tensor.dim() == 1 else tensor.T


class PackedFormat(Format):
    """A format whose tensors `fields` describes: "codes", "scales", "zeros", and "index", the group
    of each input."""

    fields: Mapping[str, Field]

    @abstractmethod
    def bits(self, part: WeightSlice) -> int:
        """Bits of a code."""

    def is_reordered(self, part: WeightSlice) -> bool:
        """Whether the columns of a group need not be neighbours (act order)."""
        return False

    def zero_points(
        self, part: WeightSlice, stored: Tensor, codes: Tensor, index: Tensor
    ) -> Tensor:
        """The zero points [out, groups] from the numbers of the file, codes [out, in] and the group
        of each column."""
        return stored

    def packed(self, part: WeightSlice) -> dict[str, Stored]:
        """All tensors of the format that the file has or must have."""
        self.header(part, self.fields["codes"].suffix)
        bits, groups, scales = self.bits(part), self.groups(part), self.fields["scales"].suffix
        shape = self.header(part, scales).shape
        if len(shape) != 2:
            raise CheckpointError(f"{part.name}.{scales} has shape {list(shape)}; it has 2 sides.")
        stored = {}
        for field in self.fields.values():
            if self.has(part, field.suffix) or not field.optional:
                dtype = self.header(part, field.suffix).dtype
                known = dtype if dtype in field.dtypes else field.dtypes[0]
                stored[field.suffix] = Stored(field.slice(part, groups, bits), known)
        return stored

    def decode_packed(self, part: WeightSlice, tensors: Mapping[str, Tensor]) -> Quantized | Tensor:
        """Numbers with outputs first; with act order, columns of a group become neighbours."""
        bits = self.bits(part)
        read = {
            name: field.read(tensors[field.suffix], part, bits)
            for name, field in self.fields.items()
            if field.suffix in tensors
        }
        codes, scales = read["codes"], read["scales"]
        index = self.groups(part).index(read.get("index"))
        if "zeros" in read:
            zeros = self.zero_points(part, read["zeros"], codes, index)
        else:
            zeros = torch.full_like(scales, 1 << (bits - 1), dtype=torch.uint8)
        return arranged(index, scales, zeros, codes, eight_bits if bits == 8 else few_bits)

    def groups(self, part: WeightSlice) -> Groups:
        """The groups of a part: all for the rank that holds some columns of an act order."""
        scales = self.fields["scales"]
        shape = self.scales(part, scales.suffix).shape
        count = shape[scales.sides.index("g")] if len(shape) == 2 else 1
        is_shared = len(part.columns) < part.shape[1]
        return groups_of(part, count, is_shared and self.is_reordered(part))


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [.., n] -> uint8 [.., n x 32 / bits]"""
    codes = (words[..., None] >> _shifts(bits, order)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def pack_words(codes: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The inverse of `unpack_words`."""
    words = codes.long().unflatten(-1, (-1, 32 // bits)) << _shifts(bits, order)
    return words.sum(-1).to(torch.int32)  # the upper 32 of 64 bits are 0


def _shifts(bits: int, order: Sequence[int] | None) -> Tensor:
    """The lowest bit of each number of a word, int32 [32 / bits]."""
    return bits * torch.tensor(order or range(32 // bits), dtype=torch.int32)
