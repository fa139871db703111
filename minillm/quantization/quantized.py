"""A quantised matrix: integer codes, and a scale for each group of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Quantized:
    """A matrix [out, in] whose rows are divided into `groups` of `in / groups` inputs each.

        w[o, i] = scales[o, i // g] * (code[o, i] - zeros[o, i // g])        integers
        w[o, i] = scales[o, i // g] * code[o, i] + minima[o, i // g]         GGUF's _1 and K formats
        w[o, i] = scales[o, i // g] * table[code[o, i]]                      NF4, FP4

    `codes` is int8 [out, in] (signed), uint8 [out, in / 2] (4 bits, unsigned, the even input in the
    low half), or float8_e4m3fn [out, in]. `scales` is a float tensor [out, groups]. At most one of
    `zeros` (int8 [out, groups]), `minima` (like scales) and `table` (float32 [16]) is given.
    `order` is int64 [in] if the inputs were reordered so that groups are contiguous (GPTQ's act
    order): column j of `codes` multiplies input `order[j]`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        out, width = self.codes.shape
        return out, width * 8 // self.bits

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.scales.shape[1]

    def parts(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: tensor for name, tensor in named if tensor is not None}

    @property
    def num_bytes(self) -> int:
        """Memory of all tensors."""
        return sum(part.nbytes for part in self.parts().values())

    def rows(self, rows: slice | Tensor) -> "Quantized":
        """Some rows, by a slice or by indices."""
        shared = {"table", "order"}
        return replace(self, **{k: v[rows] for k, v in self.parts().items() if k not in shared})

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values [out, in], computed in float32 and rounded once to `dtype`."""
        codes = split_bytes(self.codes) if self.bits == 4 else self.codes
        values = codes.float() if self.table is None else self.table[codes.long()]
        groups = values.unflatten(1, (self.scales.shape[1], -1))
        scales = self.scales.float()[..., None]
        if self.zeros is not None:
            groups = groups - self.zeros.float()[..., None]
        groups = groups * scales
        if self.minima is not None:
            groups = groups + self.minima.float()[..., None]
        weights = groups.flatten(1)
        if self.order is not None:
            weights = torch.empty_like(weights).index_copy_(1, self.order, weights)
        return weights.to(dtype)


def integer_codes(codes: Tensor, bits: int) -> Tensor:
    """Codes [out, in] as `Quantized` stores them: 4-bit codes (0 to 15) two to a byte."""
    return joined(codes) if bits == 4 else codes.to(torch.int8)


def split_bytes(packed: Tensor) -> Tensor:
    """uint8 [.., n] -> uint8 [.., 2 n]: the low half of a byte, then the high half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """The inverse of `split_bytes`: codes 0 to 15 [.., 2 n] -> uint8 [.., n]."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def stacked(parts: Sequence[Quantized]) -> Quantized | None:
    """The rows of several matrices as one; None if their formats differ."""
    first = parts[0]
    kinds = {(part.bits, part.group_size, frozenset(part.parts())) for part in parts}
    dtypes = {(part.codes.dtype, part.scales.dtype) for part in parts}
    if len(kinds) > 1 or len(dtypes) > 1:
        return None
    shared = {name for name in ("table", "order") if getattr(first, name) is not None}
    if any(
        not torch.equal(getattr(p, name), getattr(first, name)) for p in parts for name in shared
    ):
        return None
    names = first.parts().keys() - shared
    rows = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(first, **rows)
