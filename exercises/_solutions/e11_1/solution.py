"""A row is read once, because all of it fits into one program's registers.

In plain torch a softmax is five passes over memory: a maximum, a difference, an exponential, a sum
and a quotient, each of which reads or writes every number. Here the row is loaded once, all five
happen in registers, and the result is stored once. That is all that fusing means, and for a
kernel that has so little to compute it is all there is to win.

Two masks do the rest. One says which columns a row has in memory, and one which of them count. What
is masked at the load is minus infinity, whose power is 0: so neither the maximum, nor the sum, nor
the store has to ask again. The only question left is a row in which nothing counts: there the
maximum itself is minus infinity, and a difference of two infinities is no number. Taking 0 in its
place makes every power 0, and a sum of 0 may be divided by anything.
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
