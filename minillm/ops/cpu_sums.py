"""Products in C whose inner dimension is cut into parts (`panel_sums` of `c/linear.c`).

    x [N, in]   | part 0 | part 1 | part 2 | part 3 |     one sum each, from front to back
                     \\      /          \\      /
                      (0+1)              (2+3)           added as a balanced tree, in float32
                           \\            /
                            one float32 per output

A part's bits depend on its columns alone, so it does not matter who computes which: ranks that hold
one part, two or four of eight, and add what they get in the same tree, have the bits of a process
that holds all eight.
"""

import torch
from torch import Tensor

from minillm.ops import cpu

MOST_PARTS = 8  # the tree of linear.c has so many leaves at most
F32 = torch.float32


def padded_part(in_features: int, parts: int) -> int:
    """Columns of a part in panels: those it has, and zeros up to a multiple of 32."""
    each = in_features // parts
    return -(-each // cpu.PANEL_STEP) * cpu.PANEL_STEP


def with_zeros(columns: Tensor, parts: int) -> Tensor:
    """[N, in] -> [N, parts * padded_part]: the last dimension with zeros behind each part."""
    size, missing = columns.shape[1], padded_part(columns.shape[1], parts) * parts
    if missing == size:
        return columns
    wide = columns.new_zeros(len(columns), parts, missing // parts)
    wide[:, :, : size // parts] = columns.unflatten(1, (parts, -1))
    return wide.flatten(1)


def panel_sums(x: Tensor, panels: Tensor, out_features: int, parts: int) -> Tensor:
    """[N, in] and panels of a weight `with_zeros` -> float32 [N, out], the sums as they are.

    Raises:
        ValueError: the parts are not 1, 2, 4 or 8, or x does not fit the panels.
    """
    if parts not in (1, 2, 4, MOST_PARTS) or x.shape[1] % parts:
        raise ValueError(f"{x.shape[1]} inputs in {parts} parts; there can be 1, 2, 4 or 8.")
    x = with_zeros(x, parts).contiguous()
    count, size = x.shape
    if panels.shape != cpu.panels_shape(out_features, size) or x.dtype != panels.dtype:
        raise ValueError(
            f"x is {list(x.shape)}, {x.dtype}, which does not fit panels {list(panels.shape)}, "
            f"{panels.dtype}."
        )
    found = cpu.functions(x.dtype)
    if found is None:
        raise RuntimeError(f"There are no C functions for {x.dtype}.")
    torch.get_num_threads()  # as in `cpu.takes`: a new thread's OpenMP needs to be told
    out = torch.empty(count, out_features, dtype=F32)
    where = x.data_ptr(), panels.data_ptr(), out.data_ptr()
    found.panel_sums(*where, count, size, out_features, parts)
    return out
