"""e11.1: softmax over rows of different lengths, in one kernel.

Two things are to be written: the kernel, which does one row, and its launch.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(
    x, lengths, out, x_stride, out_stride, columns, temperature, BLOCK: tl.constexpr
):
    """One row. `x`, `lengths` and `out` are pointers here; change the parameters as you like."""
    # TODO e11.1: which row is this program's, where does it lie, which of its columns count?
    tl.static_assert(BLOCK > 0)


def softmax(x: torch.Tensor, lengths: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
    """Write softmax(x / temperature) of the first lengths[r] numbers of each row r into out.

    Args:
        x: [rows, columns], float32 or bfloat16; a row's numbers lie side by side, rows need not.
        lengths: [rows], int32, from 0 to columns.
        temperature: greater than 0.
        out: [rows, columns], float32, to be filled; 0 behind a row's length, and all of a row in
            which nothing counts.
    """
    raise NotImplementedError("TODO e11.1: launch the kernel")
