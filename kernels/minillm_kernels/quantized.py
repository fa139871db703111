"""Products with weights of 4 and 8 bits and activations of 16 bits, for any number of rows.

y = x W^T + b. `quantized_reference.py` has the operations in plain torch. A product of few rows is
bound by the bytes of its weight, so 4 and 8 bits are worth 3.5 and 2 times the speed of bf16 at
most; with hundreds of rows operations count, and neither is faster.

    int4     bytes   in out / 2 + 2 groups out + 2 M (in + out)     operations   2 M in out
    8 bits   bytes   in out + 2 M (in + out)

All kernels compute y^T = W x^T, so that a tile of W is the left operand: codes are unpacked in
registers, and Hopper's matrix units take only the left operand from registers. A tile of columns
lies within one group of scales; its sum is scaled in float32 and added to the total, which takes
one multiplication for a tile instead of one per weight, and rounds no weight to 16 bits.

* `int4_linear`: w = scale * (code - zero), or scale * code + minimum, in groups of 32, 64 or 128
  columns. A byte holds columns j and j + 16 of 32 (`quantized_reference.interleave`): the low
  halves of a tile multiply one part of x and the high halves another, so codes are never moved
  between threads. A code becomes a 16-bit float without a conversion: 0x4300 is 128 in bfloat16,
  where the last bit counts 1, so the bits 0x4300 | code are the number 128 + code; in float16,
  0x6400 is 1024. The subtraction of 128 + zero is exact (Kim et al., Who Says Elephants Can't Run,
  2022; Frantar et al., MARLIN, 2024). A minimum is added to the sum as minimum * sum(x).
* `scaled_linear`: e4m3 or int8, w = scale * code, with a scale for each block of (rows, columns):
  (1, in) per channel, applied once at the end; (128, 128) in DeepSeek-V3's checkpoints (2024,
  section 3.3); (1, 32) in GGUF's Q8_0. An e4m3 number has the layout of a 16-bit float with fewer
  bits: shifted into place, it is the number with another exponent bias, and one exact
  multiplication by 2^8 (float16) or 2^120 (bfloat16) corrects it. No fp8 type is needed.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.gemv import check_bias, launch_tiles, store_tile
from minillm_kernels.gemv_config import LEAST_SPLIT
from minillm_kernels.launch import KernelError, arch, num_multiprocessors, tl, triton

E4M3 = torch.float8_e4m3fn
FEWEST_COLUMNS, MOST_COLUMNS = 32, 128  # of a tile


@dataclass(frozen=True)
class Config:
    """Tile of a program: rows of W, rows of x, columns of both; `splits` programs share a row."""

    block_out: int
    block_rows: int
    block_in: int
    num_warps: int = 4
    num_stages: int = 4
    splits: int = 1


def block_in_of(group: int) -> int:
    """Columns of a tile that lies within one group of scales."""
    block = MOST_COLUMNS
    while block > FEWEST_COLUMNS and group % block:
        block //= 2
    return block


@lru_cache(maxsize=1024)
def choose_config(
    num_rows: int,
    num_out: int,
    size: int,
    block_in: int,
    arch: int,
    multiprocessors: int,
    batch_invariant: bool = False,
    full: bool = False,
) -> Config:
    """Tiles by architecture and shape. In the batch-invariant mode they do not depend on the
    number of rows. `full`: x is float32, whose products do not use matrix units."""
    rows = 1 if batch_invariant else num_rows
    block_rows = next((each for each in (16, 32, 64) if rows <= each), 128)
    if arch == 0:  # the cost of an interpreted program does not depend on its size
        return Config(64, min(block_rows, 64), block_in)
    if full:  # a tile of 64 rows would use sm_100's units, which round float32 to tf32
        return Config(32, 16, FEWEST_COLUMNS)
    large = block_rows == 128
    block_out = 128 if large else 64
    programs = triton.cdiv(num_out, block_out) * triton.cdiv(rows, block_rows)
    splits = max(1, min(2 * multiprocessors // programs, size // LEAST_SPLIT))
    return Config(block_out, block_rows, block_in, 8 if large else 4, 3 if large else 4, splits)


# ---- kernels ----------------------------------------------------------------------------------


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
def _int4_tile(
    x_ptr, codes_ptr, scales_ptr, zeros_ptr, minima_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr,
    num_rows, num_out, x_stride, codes_stride, out_stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """A tile of y^T [BLOCK_OUT, BLOCK_ROWS] from `SPLIT` columns of W and x."""
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
    tile = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    store_tile(
        total, None, 0.0, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, tile, tl.program_id(0),
        tl.program_id(2), out, here, row, num_rows, num_out, out_stride, SIZE, SPLITS, False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _scaled_tile(
    x_ptr, codes_ptr, scales_ptr, bias_ptr, out_ptr, parts_ptr, arrivals_ptr,
    num_scales, num_rows, num_out, x_stride, codes_stride, out_stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, INTEGERS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_IN: tl.constexpr,
):  # fmt: skip
    """The same with 8-bit codes: int8 if `INTEGERS`, else the bits of e4m3."""
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
        x = tl.load(x_rows + column[None, :], mask=live[:, None] & inside, other=0.0)
        weight = codes.to(x.dtype) if INTEGERS else _from_e4m3(codes, x.dtype)
        if channels:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            number = start // SCALE_COLUMNS * num_scales + out // SCALE_ROWS
            scale = tl.load(scales_ptr + number, mask=here, other=0.0).to(tl.float32)
            total += tl.dot(weight, tl.trans(x), input_precision="ieee") * scale[:, None]
    if channels:
        scale = tl.load(scales_ptr + out // SCALE_ROWS, mask=here, other=0.0).to(tl.float32)
        total *= scale[:, None]
    tile = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    store_tile(
        total, None, 0.0, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, tile, tl.program_id(0),
        tl.program_id(2), out, here, row, num_rows, num_out, out_stride, SIZE, SPLITS, False,
    )  # fmt: skip


# ---- launchers --------------------------------------------------------------------------------


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
    require.device(x=x, codes=codes, scales=scales, zeros=zeros, minima=minima, bias=bias)
    require.same_dtype(x=x, bias=bias)
    require.dtype((torch.uint8,), codes=codes)
    require.dtype(require.FLOATS, scales=scales, minima=minima)
    require.dtype((torch.int8,), zeros=zeros)
    require.shape("x", x, "M", "in")
    require.shape("scales", scales, "groups", "out")
    (groups, num_out), size = scales.shape, x.shape[1]
    if groups == 0 or size % groups:
        raise KernelError(f"x has {size} columns, which {groups} groups cannot share evenly.")
    group = size // groups
    _check_group(group, "a group")
    require.shape("codes", codes, num_out, size // 2)
    if zeros is not None and minima is not None:
        raise KernelError("zeros and minima are both given; a format has one of them.")
    for name, tensor in (("zeros", zeros), ("minima", minima)):
        if tensor is not None:
            require.shape(name, tensor, groups, num_out)
    require.contiguous(scales=scales, zeros=zeros, minima=minima)
    others = (scales, zeros, minima)
    return _product(
        _int4_tile, x, codes, others, bias, out, (), config, batch_invariant, group, GROUP=group
    )


def scaled_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int],
    out: Tensor | None = None,
    config: Config | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """`quantized_reference.scaled_linear`: x [M, in], codes e4m3 or int8 [out, in] -> [M, out].

    `scales` [ceil(in / columns), ceil(out / rows)] for `block` = (rows, columns).
    """
    require.device(x=x, codes=codes, scales=scales, bias=bias)
    require.same_dtype(x=x, bias=bias)
    require.dtype((E4M3, torch.int8), codes=codes)
    require.dtype(require.FLOATS, scales=scales)
    require.shape("x", x, "M", "in")
    require.shape("codes", codes, "out", x.shape[1])
    (rows, columns), (num_out, size) = block, codes.shape
    if rows < 1 or columns < 1:
        raise KernelError(f"block is {block}; it must be (rows, columns), each at least 1.")
    if columns < size:
        _check_group(columns, "a block of scales")
    require.shape("scales", scales, triton.cdiv(size, columns), triton.cdiv(num_out, rows))
    require.contiguous(scales=scales)
    columns = min(columns, max(size, 1))
    integers = codes.dtype == torch.int8
    numbers, group = (scales.shape[1],), 0 if columns >= size else columns
    codes = codes if integers else codes.view(torch.uint8)
    return _product(
        _scaled_tile, x, codes, (scales,), bias, out, numbers, config, batch_invariant, group,
        SCALE_ROWS=rows, SCALE_COLUMNS=columns, INTEGERS=integers,
    )  # fmt: skip


def _check_group(group: int, name: str) -> None:
    """Check that tiles of columns fit into a group."""
    if group < FEWEST_COLUMNS or group % FEWEST_COLUMNS:
        raise KernelError(
            f"{name} has {group} columns; it must have a multiple of {FEWEST_COLUMNS}. Make the "
            "matrix dense for other groups."
        )


def _product(
    kernel: Any,
    x: Tensor,
    codes: Tensor,
    others: tuple[Tensor | None, ...],
    bias: Tensor | None,
    out: Tensor | None,
    numbers: tuple[int, ...],
    config: Config | None,
    batch_invariant: bool,
    group: int,
    **constants: int | bool,
) -> Tensor:
    """Launch a kernel after the checks that all formats share."""
    require.last_contiguous(x=x, codes=codes)
    (num_rows, size), num_out = x.shape, len(codes)
    check_bias(bias, num_out)
    out = require.output(out, (num_rows, num_out), x)
    if not out.numel():
        return out
    if config is None:
        shape = num_rows, num_out, size, block_in_of(group), arch(), num_multiprocessors(x.device)
        config = choose_config(*shape, batch_invariant, x.dtype == torch.float32)
    blocks = triton.cdiv(num_out, config.block_out), triton.cdiv(num_rows, config.block_rows)
    constants |= {"BLOCK_ROWS": config.block_rows}
    launch_tiles(kernel, blocks, x, codes, others, bias, out, numbers, config, **constants)
    return out
