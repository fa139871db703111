"""A row is read once, because all of it fits into the registers of one program.

In plain torch a softmax is five passes over memory: a maximum, a difference, an exponential, a sum
and a quotient. Each of them reads or writes every number. Here the row is loaded once, all five
operations use registers, and the result is stored once. This is what fusing means, and a kernel
with so little arithmetic can gain nothing else.

Two masks do the rest. One marks the columns that exist in memory, and one those that count. The
masked lanes of the load are minus infinity, and their exponential is 0, so the maximum, the sum and
the store need no further test. One case is left: a row in which no number counts. Its maximum is
minus infinity, and a difference of two infinities is NaN. With 0 in its place every exponential is
0, and the sum of 0 is replaced before the division.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def softmax_kernel(
    x, lengths, out, x_stride, out_stride, columns, temperature, BLOCK: tl.constexpr
):
    """One row: the program's number is the row's."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row)
    at = tl.arange(0, BLOCK)
    logits = tl.load(x + row * x_stride + at, mask=at < length, other=float("-inf")).to(tl.float32)
    logits = logits / temperature
    largest = tl.max(logits, axis=0)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    powers = tl.exp(logits - largest)
    total = tl.sum(powers, axis=0)
    share = powers / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row * out_stride + at, share, mask=at < columns)


def softmax(x: torch.Tensor, lengths: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
    """Write softmax(x / temperature) of the first lengths[r] numbers of each row r into out."""
    rows, columns = x.shape
    softmax_kernel[(rows,)](
        x, lengths, out, x.stride(0), out.stride(0), columns, temperature,
        BLOCK=triton.next_power_of_2(columns),
    )  # fmt: skip
