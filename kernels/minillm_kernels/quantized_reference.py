"""The products with quantised weights in plain torch: what the kernels must compute.

Shapes: M rows of activations, `in` columns, `out` rows of the weight. Scales are stored by column
of groups, [groups, out], because a program reads one group of many rows at a time.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 32  # columns whose 4-bit codes share 16 bytes


def interleave(codes: Tensor) -> Tensor:
    """4-bit codes [out, in], one in a byte, to bytes [out, in / 2] as the kernel reads them.

    Of 32 columns, byte j holds column j in its low half and column j + 16 in its high half (the
    order of GGUF's Q4_0). Both halves multiply contiguous parts of x.
    """
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2, BLOCK // 2)).unbind(-2)
    return (low | (high << 4)).flatten(-2)


def deinterleave(packed: Tensor) -> Tensor:
    """The inverse of `interleave`: bytes [out, in / 2] -> codes [out, in]."""
    blocks = packed.unflatten(-1, (-1, BLOCK // 2))
    return torch.stack((blocks & 15, blocks >> 4), dim=-2).flatten(-3)


def by_column(values: Tensor, rows: int, columns: int, shape: tuple[int, int]) -> Tensor:
    """Scales [groups, out blocks] of blocks of `rows` x `columns`, for each weight: [out, in]."""
    wide = values.T.repeat_interleave(rows, 0)[: shape[0]]
    return wide.repeat_interleave(columns, 1)[:, : shape[1]]


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    minima: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """x W^T + b with 4-bit weights in groups: x [M, in] -> [M, out].

    `codes` uint8 [out, in / 2] from `interleave`; `scales` and either `zeros` (int8) or `minima`
    [groups, out]: w = scale * (code - zero), or scale * code + minimum. Computed in float32, or in
    float64 for x in float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    whole = deinterleave(codes).to(wide)
    group = whole.shape[1] // len(scales)

    def spread(values: Tensor) -> Tensor:
        return by_column(values.to(wide), 1, group, (len(whole), whole.shape[1]))

    if zeros is not None:
        whole = whole - spread(zeros)
    whole = whole * spread(scales)
    if minima is not None:
        whole = whole + spread(minima)
    out = F.linear(x.to(wide), whole, None if bias is None else bias.to(wide))
    return out.to(x.dtype)


def scaled_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int],
) -> Tensor:
    """x W^T + b with 8-bit weights (e4m3 or int8) and scales of blocks: x [M, in] -> [M, out].

    `scales` [ceil(in / columns), ceil(out / rows)] for `block` = (rows, columns); the last blocks
    may be incomplete. Computed in float32, or in float64 for x in float64.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    weight = codes.to(wide) * by_column(scales.to(wide), *block, (codes.shape[0], codes.shape[1]))
    return F.linear(x.to(wide), weight, None if bias is None else bias.to(wide)).to(x.dtype)
