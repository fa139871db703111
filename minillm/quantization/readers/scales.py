"""Scales of a matrix, of its rows, of groups of columns, or of blocks of both."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import CheckpointError
from minillm.layers.linear_methods import TensorSlice, WeightSlice


@dataclass(frozen=True)
class ScaleBlocks:
    """The scales of a part, which the file stores in `shape`: [] or [1] for the matrix, [out] or
    [out, 1] for rows, [out, groups], or [out / block, in / block].

    `block` gives the rows and columns of a block; the last ones may be incomplete.
    """

    part: WeightSlice
    shape: tuple[int, ...]
    block: tuple[int, int]

    @property
    def is_single(self) -> bool:
        """Whether one scale is for the whole matrix."""
        return self.shape in ((), (1,), (1, 1))

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns that share a scale. Raises CheckpointError if the shape fits none."""
        (out, width), (rows, columns) = self.part.shape, self.block
        if self.shape in ((out,), (out, 1)):
            return 1, width
        for side in (1, rows):
            if self.shape == (-(-out // side), -(-width // columns)):
                return side, columns
        raise CheckpointError(
            f"{self.part.name} has scales of shape {list(self.shape)}, which fit neither the "
            f"matrix [{out}, {width}] nor its rows, groups of {columns} or blocks of {rows} x "
            f"{columns}."
        )

    @property
    def slice(self) -> TensorSlice:
        """The scales that cover the held rows and columns."""
        if self.is_single:
            return TensorSlice.whole(self.shape)
        held = zip((self.part.rows, self.part.columns), self.sides, strict=True)
        index = tuple(slice(span.start // side, -(-span.stop // side)) for span, side in held)
        return TensorSlice(self.shape, index[: len(self.shape)])

    def by_row(self, scales: Tensor) -> tuple[Tensor, Tensor]:
        """The held scales as [out, groups], and the group of each held column [in]."""
        rows, columns = self.part.rows, self.part.columns
        places = torch.arange(columns.start, columns.stop)
        if self.is_single:
            return scales.reshape(1, 1).expand(len(rows), 1).contiguous(), places * 0
        row_side, column_side = self.sides
        scales = scales.view(len(scales), -1)
        start = rows.start % row_side
        if row_side > 1:
            scales = scales.repeat_interleave(row_side, 0)[start : start + len(rows)].contiguous()
        return scales, places // column_side - columns.start // column_side
