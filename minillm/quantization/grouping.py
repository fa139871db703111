"""Which columns of a matrix share a scale, in the file and in memory.

A file may number the group of each column (GPTQ's act order), and a rank may hold parts of groups.
In memory all groups of a matrix have the same size, and each is contiguous.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.layers.linear_methods import WeightSlice
from minillm.quantization.quantized import Quantized, integer_codes

SMALLEST_GROUP = 16  # smaller groups would need more bytes for scales than they save


@dataclass(frozen=True)
class Groups:
    """Groups of `size` columns of a part; the last one may be smaller.

    `all`: keep every group, because the columns of a rank may belong to any of them.
    """

    part: WeightSlice
    size: int
    all: bool = False

    @property
    def count(self) -> int:
        """Groups of the whole matrix."""
        return -(-self.part.shape[1] // self.size)

    @property
    def held(self) -> slice:
        """The groups of which the part has columns."""
        columns = self.part.columns
        if self.all:
            return slice(0, self.count)
        return slice(columns.start // self.size, -(-columns.stop // self.size))

    def index(self, stored: Tensor | None = None) -> Tensor:
        """The group of each held column [in], counted from the first held group; `stored` is the
        file's. Raises CheckpointError if that names a group that is not there."""
        if stored is None or bool((stored == -1).all()):  # -1: compressed-tensors' "not set"
            columns = self.part.columns
            stored = torch.arange(columns.start, columns.stop) // self.size
        low, high = (int(border) for border in stored.aminmax()) if len(stored) else (0, 0)
        if low < self.held.start or high >= self.held.stop:
            raise CheckpointError(
                f"{self.part.name} has columns of groups {low} to {high}; its groups are "
                f"{self.held.start} to {self.held.stop - 1}."
            )
        return stored.long() - self.held.start


def groups_of(part: WeightSlice, count: int, all: bool = False) -> Groups:
    """The groups of a part by their number in the file. Raises CheckpointError if the columns
    cannot be divided into so many."""
    width = part.shape[1]
    if count < 1 or count > width:
        raise CheckpointError(f"{part.name} has {count} groups of scales for {width} columns.")
    if width % count == 0:
        return Groups(part, width // count, all)
    for size in (32, 64, 128, 256, 512, 1024):  # the last group is smaller
        if -(-width // size) == count:
            return Groups(part, size, all)
    raise CheckpointError(
        f"{part.name} has {count} groups of scales, which do not divide its {width} columns."
    )


def arranged(
    index: Tensor, scales: Tensor, zeros: Tensor | None, codes: Tensor, store: "Store"
) -> Quantized | Tensor:
    """A matrix whose column i has the scale of group `index[i]`.

    Args:
        index: [in]
        scales, zeros: [out, groups]
        codes: [out, in], as numbers.
        store: the resident form of codes, scales and zeros with equal contiguous groups.

    Returns:
        The resident form, or float32 [out, in] if equal groups would be too small.
    """
    ordered, order = torch.sort(index, stable=True)
    present, counts = torch.unique_consecutive(ordered, return_counts=True)
    side = math.gcd(*counts.tolist())
    if side < min(SMALLEST_GROUP, len(index)):
        return dense(index, scales, zeros, codes)
    which = present.repeat_interleave(counts // side)
    if len(which) != scales.shape[1] or bool((which[1:] <= which[:-1]).any()):
        scales, zeros = scales[:, which], None if zeros is None else zeros[:, which]
    if torch.equal(ordered, index):
        return store(codes, scales, zeros)
    return replace(store(codes[:, order].contiguous(), scales, zeros), order=order)


def dense(index: Tensor, scales: Tensor, zeros: Tensor | None, codes: Tensor) -> Tensor:
    """The values [out, in] in float32."""
    values = codes.float()
    if zeros is not None:
        values = values - zeros.float()[:, index]
    return values * scales.float()[:, index]


Store = Callable[[Tensor, Tensor, Tensor | None], Quantized]


def few_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Quantized:
    """Unsigned codes of at most 4 bits, which have zero points."""
    return Quantized(
        integer_codes(codes, 4), scales, None if zeros is None else zeros.to(torch.int8)
    )


def eight_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Quantized:
    """Unsigned 8-bit codes become signed; a zero point of 128 everywhere is not needed then."""
    signed = (codes.to(torch.int16) - 128).to(torch.int8)
    offsets = None if zeros is None else (zeros.to(torch.int16) - 128).to(torch.int8)
    return Quantized(signed, scales, offsets if offsets is not None and offsets.any() else None)


def signed_bits(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Quantized:
    """Codes that are stored as they are: int8 or float8."""
    return Quantized(codes, scales, None if zeros is None or not zeros.any() else zeros)
