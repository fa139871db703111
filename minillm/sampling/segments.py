"""Ragged per-row data on the device: flat columns, one segment per row, no padding.

    owner    3 3 3 3 | 0 0 | 7 7 7
    token    . . . . | . . | . . .        a column; all columns have the same segments

One operation processes the segments of all rows. Adding or removing a row is rare and rebuilds the
columns; the host knows all sizes, so this does not synchronise.
"""

from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from minillm.ops.transfers import upload


class Segments:
    """Named columns, each [T] or [T, width], and the owner row of each of the T places."""

    def __init__(self, device: torch.device):
        self.device = device
        self._sizes: dict[int, int] = {}  # in the order of the segments
        self._starts: dict[int, int] = {}
        self._columns: dict[str, Tensor] = {}
        self.owner = torch.zeros(0, dtype=torch.int64, device=device)

    def __getitem__(self, name: str) -> Tensor:
        return self._columns[name]

    def start(self, row: int) -> int:
        """Start of a row's segment."""
        return self._starts[row]

    def size(self, row: int) -> int:
        """Length of a row's segment."""
        return self._sizes[row]

    def span(self, rows: Iterable[int]) -> slice:
        """The smallest slice that contains the segments of these rows, and perhaps of others."""
        owners = [row for row in rows if row in self._sizes]
        starts = [self._starts[row] for row in owners]
        ends = [self._starts[row] + self._sizes[row] for row in owners]
        return slice(min(starts, default=0), max(ends, default=0))

    def of(self, row: int, name: str) -> Tensor:
        """One row's segment of a column."""
        start = self.start(row)
        return self._columns[name][start : start + self._sizes[row]]

    def copy(self) -> "Segments":
        """A copy; writing to one does not change the other."""
        other = Segments(self.device)
        other._sizes, other._starts, other.owner = dict(self._sizes), self._starts, self.owner
        other._columns = {name: column.clone() for name, column in self._columns.items()}
        return other

    def put(self, row: int, **columns: NDArray | Tensor) -> None:
        """Set the segment of a row, replacing any it has, from arrays or tensors on the device. In
        a 2-D column, narrower segments are padded with -1 on the left."""
        self.drop(row)
        (size,) = {len(column) for column in columns.values()}
        for name, column in columns.items():
            old = self._columns.get(name)
            new = column if isinstance(column, Tensor) else upload(self.device, column)[0]
            self._columns[name] = new if old is None else torch.cat(_as_wide(old, new))
        self._sizes[row] = size
        self._own()

    def drop(self, row: int) -> None:
        """Remove a row's segment, if it has one."""
        if row not in self._sizes:
            return
        start = self.start(row)
        end = start + self._sizes.pop(row)
        for name, column in self._columns.items():
            self._columns[name] = torch.cat((column[:start], column[end:]))
        self._own()

    def move(self, source: int, target: int) -> None:
        """Make `target` the owner of the segment of `source`, if there is one."""
        if source in self._sizes:
            self._sizes = {
                target if row == source else row: size for row, size in self._sizes.items()
            }
            self._own()

    def _own(self) -> None:
        starts = accumulate(self._sizes.values(), initial=0)
        self._starts = dict(zip(self._sizes, starts, strict=False))
        rows = np.array(list(self._sizes), dtype=np.int64)
        (self.owner,) = upload(self.device, rows.repeat(list(self._sizes.values())))


def _as_wide(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the narrower of two columns with -1 on the left to the width of the wider."""
    if one.dim() == 1:
        return one, other
    width = max(one.shape[1], other.shape[1])
    return (
        pad(one, (width - one.shape[1], 0), value=-1),
        pad(other, (width - other.shape[1], 0), value=-1),
    )
