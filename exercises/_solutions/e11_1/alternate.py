"""e11.1 with a tile of several rows, the power of two as its base, and no special case."""

import math

import torch
import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # of what a float32 can be: whatever is below counts for nothing


@triton.jit
def normalised(scores, counts):
    """Shares along the second axis; `counts` says which scores take part."""
    scores = tl.where(counts, scores, LOWEST)
    powers = tl.where(counts, tl.exp2(scores - tl.max(scores, axis=1)[:, None]), 0.0)
    return powers / tl.maximum(tl.sum(powers, axis=1), 1e-30)[:, None]


@triton.jit
def tile_kernel(
    source, source_step, target, target_step, lengths, scale, rows, columns,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROWS rows at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    exists = row < rows
    ends = tl.load(lengths + row, mask=exists, other=0)[:, None]
    counts = column < ends
    scores = tl.load(source + row[:, None] * source_step + column, mask=counts, other=0.0)
    scores = scores.to(tl.float32) * scale
    shares = normalised(scores, counts & (scores > LOWEST))
    where = target + row[:, None] * target_step + column
    tl.store(where, shares, mask=exists[:, None] & (column < columns))


def softmax(x: torch.Tensor, lengths: torch.Tensor, temperature: float, out: torch.Tensor) -> None:
    """Four rows per program, for rows of any length."""
    rows, columns = x.shape
    scale = math.log2(math.e) / temperature

    def grid(meta: dict) -> tuple[int]:
        return (triton.cdiv(rows, meta["ROWS"]),)

    tile_kernel[grid](
        x, x.stride(0), out, out.stride(0), lengths, scale, rows, columns,
        ROWS=4, COLUMNS=triton.next_power_of_2(columns),
    )  # fmt: skip
