"""Products with 8-bit weights, e4m3 or int8, and scales of rows or blocks (W8A16 and FP8 W8A8).

y = x W^T + b with w = scale * code. `scales` belongs to blocks of (rows, columns): (1, in) per
channel, (128, 128) in DeepSeek-V3's checkpoints (2024, section 3.3), (1, 32) in GGUF's Q8_0.

    bytes   in out + 2 M (in + out)         operations   2 M in out

* W8A16: x has 16 bits, and codes are converted to its dtype, which is exact. An e4m3 number has the
  layout of a 16-bit float with fewer bits: shifted into place, it is the number with another
  exponent bias, and one exact multiplication by 2^8 (float16) or 2^120 (bfloat16) corrects it. This
  needs no fp8 type, so it also runs on sm_80.
* FP8 W8A8: x is e4m3 with a scale per row (`quantize_rows`). Matrix units of sm_89 and later
  multiply e4m3 directly; on sm_80 both factors are converted to float16, with the same products.
* A tile of columns lies within one block. Its sum is scaled in float32 and added to the total,
  which also avoids long sums in the matrix units: Hopper's fp8 products keep only about 14 bits
  (DeepSeek-V3, section 3.3.2). A scale per channel is applied once, at the end.
"""

import torch
from torch import Tensor

from minillm_kernels.int4_linear import add_splits
from minillm_kernels.launch import (
    FLOATS,
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

__all__ = ["Config", "scaled_linear"]

E4M3 = torch.float8_e4m3fn
FIRST_FP8 = 89  # compute capability of the first matrix units for fp8


@triton.jit
def _from_e4m3(bits, DTYPE: tl.constexpr):
    """The numbers of e4m3 bits (uint8), exactly, in `DTYPE`. (NaN becomes 480.)"""
    if tl.bfloat16 == DTYPE:
        wide = bits.to(tl.int16)
        moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 4)
        return moved.to(tl.bfloat16, bitcast=True) * 1.329227995784916e36  # 2^120
    elif tl.float16 == DTYPE:
        wide = bits.to(tl.int16)
        moved = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return moved.to(tl.float16, bitcast=True) * 256.0
    else:
        wide = bits.to(tl.int32)
        moved = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return moved.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit(do_not_specialize=["num_rows"])
def _scaled_tile(
    x_ptr, x_scales_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, num_rows, num_out, num_scales,
    x_stride, codes_stride, out_stride, split_stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    INTEGERS: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """A tile of y^T [BLOCK_OUT, BLOCK_ROWS] from `SPLIT` columns of W and x.

    With one split, `out` is y; with several, a float32 workspace with a matrix per split.
    """
    out = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    here, live = out < num_out, row < num_rows
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    code_rows = codes_ptr + out.to(tl.int64)[:, None] * codes_stride
    channels: tl.constexpr = SCALE_COLUMNS >= SIZE
    begin = tl.program_id(2) * SPLIT
    total = tl.zeros((BLOCK_OUT, BLOCK_ROWS), tl.float32)
    for start in range(begin, tl.minimum(begin + SPLIT, SIZE), BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = (column < SIZE)[None, :]
        place = code_rows + column[None, :]
        mask = here[:, None] & inside
        codes = tl.load(place, mask=mask, other=0, eviction_policy="evict_first")
        x = tl.load(x_rows + column[None, :], mask=live[:, None] & inside, other=0)
        if x_scales_ptr is not None:
            if UPCAST:
                weight, x = _from_e4m3(codes, tl.float16), _from_e4m3(x, tl.float16)
            else:
                weight = codes.to(tl.float8e4nv, bitcast=True)
                x = x.to(tl.float8e4nv, bitcast=True)
        elif INTEGERS:
            weight = codes.to(x.dtype)
        else:
            weight = _from_e4m3(codes, x.dtype)
        if channels:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            number = start // SCALE_COLUMNS * num_scales + out // SCALE_ROWS
            scale = tl.load(scales_ptr + number, mask=here, other=0.0).to(tl.float32)
            total += tl.dot(weight, tl.trans(x), input_precision="ieee") * scale[:, None]
    if channels:
        scale = tl.load(scales_ptr + out // SCALE_ROWS, mask=here, other=0.0).to(tl.float32)
        total *= scale[:, None]
    if x_scales_ptr is not None:
        total *= tl.load(x_scales_ptr + row, mask=live, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + out, mask=here, other=0.0).to(tl.float32)[:, None]
    place = out_ptr + tl.program_id(2).to(tl.int64) * split_stride
    place += row.to(tl.int64)[None, :] * out_stride + out[:, None]
    mask = here[:, None] & live[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=mask)


def scaled_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int],
    x_scales: Tensor | None = None,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    config: Config | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`quantized_reference.scaled_linear`: x [M, in], codes e4m3 or int8 [out, in] -> [M, out].

    `scales` [ceil(in / columns), ceil(out / rows)] for `block` = (rows, columns). With `x_scales`
    float32 [M], x is e4m3 (and the codes, too), and the result has `dtype` (default: bfloat16).
    """
    tensors = {"x": x, "codes": codes, "scales": scales, "bias": bias, "x_scales": x_scales}
    device = check_device(**tensors)
    kind = _check(x, codes, scales, bias, block, x_scales, dtype)
    (num_rows, size), num_out = x.shape, len(codes)
    out = output(out, (num_rows, num_out), scales.new_empty(0, dtype=kind))
    if not out.numel():
        return out
    columns = min(block[1], max(size, 1))
    per_channel = columns >= size
    if config is None:
        block_in = block_in_of(0 if per_channel else columns)
        shape = num_rows, num_out, size, block_in, arch(), num_multiprocessors(device)
        config = choose_config(*shape, batch_invariant, x.dtype == torch.float32)
    grid = grid_of(config, num_rows, num_out, size)
    target = partial_sums(out, grid.num_splits, torch.float32)
    _scaled_tile[grid.blocks](
        *(x if x_scales is None else x.view(torch.uint8), x_scales),
        *(codes if codes.dtype == torch.int8 else codes.view(torch.uint8), scales),
        *(None if grid.num_splits > 1 else bias, target),
        *(num_rows, num_out, scales.shape[1]),
        *(x.stride(0), codes.stride(0), target.stride(-2), target.stride(0)),
        SIZE=size,
        SPLIT=grid.split,
        SCALE_ROWS=block[0],
        SCALE_COLUMNS=columns,
        INTEGERS=codes.dtype == torch.int8,
        UPCAST=0 < arch() < FIRST_FP8,
        BLOCK_OUT=config.block_out,
        BLOCK_ROWS=config.block_rows,
        BLOCK_IN=config.block_in,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if grid.num_splits > 1:
        add_splits(target, bias, out)
    return out


def _check(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    block: tuple[int, int],
    x_scales: Tensor | None,
    dtype: torch.dtype | None,
) -> torch.dtype:
    """Check the arguments; returns the dtype of the result."""
    check_shape("x", x, "M", "in")
    check_shape("codes", codes, "out", x.shape[1])
    (num_rows, size), num_out = x.shape, len(codes)
    if x_scales is None:
        check_same_dtype(x=x, bias=bias)
        check_dtype((E4M3, torch.int8), codes=codes)
        kind = x.dtype
    else:
        check_dtype((E4M3,), x=x, codes=codes)
        check_dtype((torch.float32,), x_scales=x_scales)
        check_shape("x_scales", x_scales, num_rows)
        kind = dtype or torch.bfloat16
    if (dtype or kind) != kind or kind not in FLOATS:
        raise KernelError(f"the result is {dtype}; it must be {kind} (e4m3: any float type).")
    check_dtype(FLOATS, scales=scales, bias=bias)
    rows, columns = block
    if rows < 1 or columns < 1:
        raise KernelError(f"block is {block}; it must be (rows, columns), each at least 1.")
    if columns < size:
        check_group(columns, "a block of scales")
    check_shape("scales", scales, triton.cdiv(size, columns), triton.cdiv(num_out, rows))
    check_last_contiguous(x=x, codes=codes)
    check_contiguous(scales=scales, x_scales=x_scales)
    check_bias(bias, num_out)
    return kind
