"""Products in C with a fixed summation order over parts of the inner dimension (`panel_sums` of
`c/linear.c`).

    x [N, in]   | part 0 | part 1 | part 2 | part 3 |     one sequential sum each
                     \\      /          \\      /
                      (0+1)              (2+3)           added as a balanced tree, in float32
                           \\            /
                            one float32 per output

The sum of a part depends only on its columns. So ranks that hold one, two or four of eight parts,
and add their sums in the same tree, get the same bits as one process that holds all eight.
"""

import torch
from torch import Tensor

from minillm.ops import cpu

MOST_PARTS = 8  # maximum number of leaves of the tree in linear.c
F32 = torch.float32


def padded_part(in_features: int, parts: int) -> int:
    """Columns of a part, padded with zeros to a multiple of 32."""
    each = in_features // parts
    return -(-each // cpu.PANEL_STEP) * cpu.PANEL_STEP


def with_zeros(columns: Tensor, parts: int) -> Tensor:
    """[N, in] -> [N, parts * padded_part]: zeros appended to each part of the last dimension."""
    size, missing = columns.shape[1], padded_part(columns.shape[1], parts) * parts
    if missing == size:
        return columns
    wide = columns.new_zeros(len(columns), parts, missing // parts)
    wide[:, :, : size // parts] = columns.unflatten(1, (parts, -1))
    return wide.flatten(1)


def panel_sums(x: Tensor, panels: Tensor, out_features: int, parts: int) -> Tensor:
    """x [N, in] and panels of a weight `with_zeros` -> float32 [N, out], unrounded sums.

    Raises:
        ValueError: the parts are not 1, 2, 4 or 8, or x does not fit the panels.
    """
    if parts not in (1, 2, 4, MOST_PARTS) or x.shape[1] % parts:
        raise ValueError(
            f"{x.shape[1]} inputs cannot be split into {parts} parts; there can be 1, 2, 4 or 8."
        )
    x = with_zeros(x, parts).contiguous()
    count, size = x.shape
    if panels.shape != cpu.panels_shape(out_features, size) or x.dtype != panels.dtype:
        raise ValueError(
            f"x is {list(x.shape)}, {x.dtype}, which does not fit panels {list(panels.shape)}, "
            f"{panels.dtype}."
        )
    out = torch.empty(count, out_features, dtype=F32)
    where = x.data_ptr(), panels.data_ptr(), out.data_ptr()
    cpu.ready(x.dtype).panel_sums(*where, count, size, out_features, parts)
    return out
