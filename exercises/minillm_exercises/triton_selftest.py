"""One small Triton kernel and what it must return; `doctor` runs it interpreted, in a process.

An interpreter that breaks (it has, with versions of numpy) may return zeros without any error, so
the values are compared and not only computed.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def scaled_softmax(x, out, columns, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row per program: masked loads, a maximum, an exponential, a sum, a masked store."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=float("-inf")) * scale
    powers = tl.exp(values - tl.max(values, axis=0))
    tl.store(out + row * columns + at, powers / tl.sum(powers, axis=0), mask=inside)


def largest_error(rows: int = 3, columns: int = 13) -> float:
    """The largest difference from torch, of a width that is no power of two. The output starts
    as NaN, so that what is not stored counts."""
    x = torch.linspace(-2, 3, rows * columns).reshape(rows, columns)
    out = torch.full_like(x, float("nan"))
    scaled_softmax[(rows,)](x, out, columns, 0.5, BLOCK=16)
    return (out - torch.softmax(x * 0.5, dim=1)).abs().max().item()
