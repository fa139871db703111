"""Products with 4-bit weights in groups (W4A16), for any number of rows.

y = x W^T + b with x [M, in] in 16 bits and w = scale * (code - zero), or scale * code + minimum. A
group of 32, 64 or 128 columns shares a scale of 16 bits, so a weight has 4.1 to 4.8 bits:

    bytes   in out / 2 + 2 groups out + 2 M (in + out)       operations   2 M in out

With few rows this is memory-bound, and reads 3.2 to 3.6 times fewer bytes than bf16.

* A byte holds columns j and j + 16 of 32 (`quantized_reference.interleave`). The low halves of a
  tile multiply one part of x and the high halves another, so codes are never moved between threads.
* A code becomes a 16-bit float without a conversion: 0x4300 is 128 in bfloat16, where the last bit
  counts 1, so the bits 0x4300 | code are the number 128 + code; in float16, 0x6400 is 1024. The
  subtraction of 128 + zero is exact (Kim et al., Who Says Elephants Can't Run, 2022; Frantar et
  al., MARLIN, 2024).
* A tile lies within one group. The product is computed with the integers code - zero, and the
  scale is applied to its sum: one multiplication for a tile of columns instead of one per weight,
  and no rounding of weights to 16 bits.
* A minimum is added to the sum as minimum * sum(x).

Inputs of weights with another order of columns (GPTQ's act order) are gathered before the call.
"""

import torch
from torch import Tensor

from minillm_kernels.gemv import _sum_splits
from minillm_kernels.launch import (
    FLOATS,
    INTERPRETED,
    KernelError,
    arch,
    check_contiguous,
    check_device,
    check_dtype,
    check_last_contiguous,
    check_same_dtype,
    check_shape,
    num_multiprocessors,
    output,
    tl,
    triton,
)
from minillm_kernels.quantized_config import (
    Config,
    block_in_of,
    check_bias,
    check_group,
    choose_config,
    grid_of,
    partial_sums,
)

__all__ = ["Config", "int4_linear"]


@triton.jit
def _numbers(codes, zero, DTYPE: tl.constexpr):
    """code - zero, exactly, in `DTYPE`: codes [out, n] from 0 to 15, zero float32 [out]."""
    if tl.bfloat16 == DTYPE:
        biased = (codes.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return biased - (zero + 128.0).to(tl.bfloat16)[:, None]
    elif tl.float16 == DTYPE:
        biased = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True)
        return biased - (zero + 1024.0).to(tl.float16)[:, None]
    else:
        return codes.to(tl.float32) - zero[:, None]


@triton.jit(do_not_specialize=["num_rows"])
def _int4_tile(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, bias_ptr, out_ptr, num_rows, num_out,
    x_stride, codes_stride, out_stride, split_stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """A tile of y^T [BLOCK_OUT, BLOCK_ROWS] from `SPLIT` columns of W and x.

    With one split, `out` is y; with several, a float32 workspace with a matrix per split.
    """
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    here = out < num_out
    live = (row < num_rows)[:, None]
    byte = tl.arange(0, BLOCK_IN // 2)
    first = byte // 16 * 32 + byte % 16  # column of a byte's low half
    low_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride + first[None, :]
    code_rows = codes_ptr + out.to(tl.int64)[:, None] * codes_stride + byte[None, :]
    begin = tl.program_id(2) * SPLIT
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for start in range(begin, tl.minimum(begin + SPLIT, SIZE), BLOCK_IN):
        place = code_rows + start // 2
        packed = tl.load(place, mask=here[:, None], other=0, eviction_policy="evict_first")
        low_x = tl.load(low_rows + start, mask=live, other=0.0)
        high_x = tl.load(low_rows + start + 16, mask=live, other=0.0)
        number = start // GROUP * num_out + out
        scale = tl.load(scales_ptr + number, mask=here, other=0.0).to(tl.float32)
        zero = tl.zeros((BLOCK_OUT,), tl.float32)
        if zeros_ptr is not None:
            zero += tl.load(zeros_ptr + number, mask=here, other=0).to(tl.float32)
        low = _numbers(packed & 15, zero, low_x.dtype)
        high = _numbers(packed >> 4, zero, low_x.dtype)
        part = tl.dot(low, tl.trans(low_x), input_precision="ieee")
        part = tl.dot(high, tl.trans(high_x), part, input_precision="ieee")
        total += part * scale[:, None]
        if minima_ptr is not None:
            minimum = tl.load(minima_ptr + number, mask=here, other=0.0).to(tl.float32)
            sums = tl.sum(low_x.to(tl.float32) + high_x.to(tl.float32), axis=1)
            total += minimum[:, None] * sums[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + out, mask=here, other=0.0).to(tl.float32)[:, None]
    place = out_ptr + tl.program_id(2).to(tl.int64) * split_stride
    place += row.to(tl.int64)[None, :] * out_stride + out[:, None]
    mask = here[:, None] & (row < num_rows)[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


def int4_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    minima: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`quantized_reference.int4_linear`: x [M, in], codes uint8 [out, in / 2] -> [M, out].

    `scales` and either `zeros` (int8) or `minima`: [groups, out]. Rows of x may have any stride.
    """
    device = check_device(x=x, codes=codes, scales=scales, zeros=zeros, minima=minima, bias=bias)
    check_same_dtype(x=x, bias=bias)
    check_shape("x", x, "M", "in")
    num_rows, size = x.shape
    _check_weight(size, codes, scales, zeros, minima)
    check_last_contiguous(x=x)
    num_out, group = len(codes), size // len(scales)
    check_bias(bias, num_out)
    out = output(out, (num_rows, num_out), x)
    if not out.numel():
        return out
    if config is None:
        shape = num_rows, num_out, size, block_in_of(group), arch(), num_multiprocessors(device)
        config = choose_config(*shape, batch_invariant, x.dtype == torch.float32)
    grid = grid_of(config, num_rows, num_out, size)
    target = partial_sums(out, grid.num_splits, torch.float32)
    _int4_tile[grid.blocks](
        *(x, codes, scales, zeros, minima, None if grid.num_splits > 1 else bias, target),
        *(num_rows, num_out, x.stride(0), codes.stride(0), target.stride(-2), target.stride(0)),
        SIZE=size,
        SPLIT=grid.split,
        GROUP=group,
        BLOCK_OUT=config.block_out,
        BLOCK_ROWS=config.block_rows,
        BLOCK_IN=config.block_in,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if grid.num_splits > 1:
        add_splits(target, bias, out)
    return out


def add_splits(parts: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Add partial results [splits, M, out] to `out`, in the order of the splits."""
    splits, num_rows, num_out = parts.shape
    block = 8192 if INTERPRETED else 512
    _sum_splits[(triton.cdiv(num_rows * num_out, block),)](
        *(parts, bias, out, num_rows * num_out, num_out, out.stride(0)),
        SPLITS=splits,
        BLOCK=block,
        num_warps=4,
    )


def _check_weight(
    size: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None
) -> None:
    check_dtype((torch.uint8,), codes=codes)
    check_dtype(FLOATS, scales=scales, minima=minima)
    check_dtype((torch.int8,), zeros=zeros)
    check_shape("scales", scales, "groups", "out")
    groups, num_out = scales.shape
    if groups == 0 or size % groups:
        raise KernelError(f"x has {size} columns, which {groups} groups cannot share evenly.")
    check_group(size // groups)
    check_shape("codes", codes, num_out, size // 2)
    check_last_contiguous(codes=codes)
    if zeros is not None and minima is not None:
        raise KernelError("zeros and minima are both given; a format has one of them.")
    for name, tensor in (("zeros", zeros), ("minima", minima)):
        if tensor is not None:
            check_shape(name, tensor, groups, num_out)
    check_contiguous(scales=scales, zeros=zeros, minima=minima)
