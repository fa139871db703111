"""Matrix products of few rows with a large weight, the main operation of decoding.

y = x W^T + b with x [M, in] and W [out, in]. Up to M = 64 every weight is read once and used M
times; at M = 1 there is one multiply-add for two bytes (bf16):

    bytes   s (in out + M in + M out)       operations   2 M in out

An H200 reaches 790 TFLOP/s and 4.3 TB/s, so products are memory-bound below about 180 rows.
Bandwidth times latency is about 30 kB in flight per multiprocessor; both kernels keep more than
twice that in flight.

* One row: no matrix units. A program takes up to eight rows of W, 1024 columns at a time. Two tiles
  are in flight to shared memory (cp.async) while one is multiplied; loads to registers would be
  moved by the assembler to just before their use. A thread multiplies its 16 bytes of every row
  with its part of x, and keeps one sum per row.
* More rows: the operands are swapped, y^T = W x^T, because a tile of Hopper's matrix product has at
  least 64 rows, which W provides and x does not. W is prefetched to shared memory, three tiles
  ahead, and WGMMA reads it from there without passing through registers. A tile has 16, 32 or 64
  rows of x; with more than 64, each tile of rows reads W again, from the L2 cache.
* A weight with few rows gives too few programs to fill the GPU. Then `in` is split, partial sums go
  to a workspace, and the program of a tile that arrives last adds them. It adds in the order of
  the splits, so the same input always gives the same bits, whichever program is last.

`norm_linear` fuses the preceding residual addition and RMSNorm, which saves a launch and the round
trip of the normalised rows through memory. Every program adds the residual itself, from the L2
cache; the first stores the sum. RMSNorm scales each row by a factor and each column by the norm's
weight. The squares are summed during the product, and the factor is applied to its result, so x is
read once. Rounding: a separate norm rounds x * factor * weight to 16 bits, the matrix units get x *
weight, rounded once, too. In fp16 this could overflow, so a tile of columns is divided by its row's
largest number, and its product multiplied by that. One row is not rounded at all.

Every program reads all of x and the residual: at 64 rows, with tiles of 128 rows of W, as many
bytes from the L2 cache as W has. So this wins with few rows, and cuBLAS behind a separate norm with
many; where they meet, no GPU has measured.

With `dependent`, a launch begins before the one before it has ended (`dependent.py`).

If `gated`, the product's outputs are gate and up of SwiGLU, and silu(gate) * up is stored. Rows of
W for gate and for up alternate in a tile, so that one program has both.

With `batch_invariant=True` all rows are computed in tiles of 16, also a single one, with tiles and
splits that do not depend on M: a row has the same bits for every M (He et al., Defeating
Nondeterminism in LLM Inference, 2025).

`quantized.py` computes the same with weights of 4 and 8 bits.

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019.
"""

from math import prod
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.dependent import DEPENDENT, launch_options, wait_for_inputs
from minillm_kernels.gemv_config import LEAST_ROWS, Config, config_for
from minillm_kernels.launch import (
    KernelError,
    arch,
    arrival_counters,
    num_multiprocessors,
    padded,
    tl,
    triton,
)

# ---- one row ----------------------------------------------------------------------------------


@triton.jit
def weight_rows_of(tile, num_out, BLOCK_OUT: tl.constexpr, GATED: tl.constexpr):
    """Rows of W of a tile, and which exist. If `GATED`, of gate and up in turn: W is [gate, up]."""
    place = tile * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    return (place // 2 + place % 2 * (num_out // 2) if GATED else place), place < num_out


@triton.jit
def load_sum(x_place, residual_ptr, offset, mask):
    """x, plus the residual if there is one, rounded as if it had been stored."""
    x = tl.load(x_place, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + offset, mask=mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _one_row(
    x_ptr, residual_ptr, norm_weight_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, eps, num_out,
    weight_stride, SIZE: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr,
    VECTOR: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The numbers of y from `BLOCK_OUT` rows of W."""
    tile = tl.program_id(0)
    out, here = weight_rows_of(tile, num_out, BLOCK_OUT, GATED)
    if DEPENDENT:
        wait_for_inputs(weight_ptr, weight_stride, out, here, 0, SIZE, 2 * BLOCK_IN)
    weight_rows = weight_ptr + out.to(tl.int64)[:, None] * weight_stride
    # A thread loads `VECTOR` numbers at once, so it can sum them by itself.
    total = tl.zeros((BLOCK_OUT, BLOCK_IN // VECTOR), tl.float32)
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    for start in tl.range(0, SIZE, BLOCK_IN, num_stages=STAGES):
        column = start + tl.arange(0, BLOCK_IN)
        inside = column < SIZE
        mask = here[:, None] & inside[None, :]
        place = weight_rows + column[None, :]
        # Not read again in this step: a hint for loads to registers; cp.async has no such hint.
        weight = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
        added = load_sum(x_ptr + column, residual_ptr, column, inside)
        if sum_ptr is not None:
            tl.store(sum_ptr + column, added, mask=column < tl.where(tile == 0, SIZE, 0))
        x = added.to(tl.float32)
        if norm_weight_ptr is not None:
            squares += x * x
            x *= tl.load(norm_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        products = weight.to(tl.float32) * x[None, :]
        total += tl.sum(tl.reshape(products, (BLOCK_OUT, BLOCK_IN // VECTOR, VECTOR)), axis=2)
    result = tl.sum(total, axis=1)
    if norm_weight_ptr is not None:
        result *= tl.rsqrt(tl.sum(squares) / SIZE + eps)  # the norm's factor
    store_tile(
        result[:, None], None, eps, bias_ptr, out_ptr, None, None, tile, tile, 0, out, here,
        tl.arange(0, 1), 1, num_out, 0, SIZE, 1, GATED,
    )  # fmt: skip


# ---- several rows -----------------------------------------------------------------------------


@triton.jit
def store_tile(
    total, squares, eps, bias_ptr, out_ptr, parts_ptr, arrivals_ptr, tile, block, split,
    out, here, row, num_rows, num_out, out_stride,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Store a tile of y^T [BLOCK_OUT, ROWS], plus the bias; `here` [BLOCK_OUT] marks what exists.
    Unless None, `squares` [ROWS] of x are those of a norm, whose factor is applied.

    Of several splits each stores its part [splits, M, out + 16]; the last to arrive adds them all
    and sets the tile's counter back to 0. Squares are behind the outputs; all tiles store the same.
    """
    stored = num_rows
    if SPLITS > 1:
        mask = here[:, None] & (row < num_rows)[None, :]
        width = num_out + 16  # aligned as the outputs are
        row_parts = parts_ptr + row.to(tl.int64) * width
        part = row_parts[None, :] + out[:, None]
        row_parts += num_out
        step = num_rows.to(tl.int64) * width
        tl.store(part + split * step, total, mask=mask)
        if squares is not None:
            tl.store(row_parts + split * step, squares, mask=row < num_rows)
        tl.debug_barrier()  # all threads have stored before the arrival is signalled
        last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        stored = tl.where(last, num_rows, 0)
        if last:
            total = tl.zeros_like(total)
            for each in tl.static_range(SPLITS):
                total += tl.load(part + each * step, mask=mask, other=0.0, cache_modifier=".cg")
            if squares is not None:
                squares = tl.zeros_like(squares)
                for each in tl.static_range(SPLITS):
                    place = row_parts + each * step
                    squares += tl.load(place, mask=row < num_rows, other=0.0, cache_modifier=".cg")
            tl.store(arrivals_ptr + tile, 0)
    if squares is not None:
        total *= tl.rsqrt(squares / SIZE + eps)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + out, mask=here, other=0.0).to(tl.float32)[:, None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if GATED:
        half: tl.constexpr = total.shape[0] // 2
        pairs = tl.permute(tl.reshape(total, (half, 2, total.shape[1])), (0, 2, 1))
        gate, up = tl.split(pairs.to(dtype).to(tl.float32))  # rounded, as if stored before
        total = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32) * up
        out = block * half + tl.arange(0, half)
        here = out < num_out // 2
    place = out_ptr + row.to(tl.int64)[None, :] * out_stride + out[:, None]
    mask = here[:, None] & (row < stored)[None, :]
    tl.store(place, total.to(dtype), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _several_rows(
    x_ptr, weight_ptr, residual_ptr, norm_weight_ptr, sum_ptr, bias_ptr, out_ptr, parts_ptr,
    arrivals_ptr, eps, num_rows, num_out, x_stride, weight_stride, out_stride,
    SIZE: tl.constexpr, SPLIT: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, VECTOR: tl.constexpr, GATED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A tile of y^T [BLOCK_OUT, ROWS] from `SPLIT` columns of W and x. Neighbouring programs
    share rows of W, which are in the cache then."""
    block = tl.program_id(1)
    out, here = weight_rows_of(block, num_out, BLOCK_OUT, GATED)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    begin = tl.program_id(2) * SPLIT
    if DEPENDENT:
        wait_for_inputs(weight_ptr, weight_stride, out, here, begin, SIZE, 2 * BLOCK_IN)
    live = (row < num_rows)[:, None]
    kept = (row < tl.where(block == 0, num_rows, 0))[:, None]  # of the sum: by one program
    x_rows = x_ptr + row.to(tl.int64)[:, None] * x_stride
    weight_rows = weight_ptr + out.to(tl.int64)[:, None] * weight_stride
    offsets = row.to(tl.int64)[:, None] * SIZE
    total = tl.zeros((BLOCK_OUT, ROWS), tl.float32)
    squares = tl.zeros((ROWS, BLOCK_IN // VECTOR), tl.float32)
    for start in range(begin, tl.minimum(begin + SPLIT, SIZE), BLOCK_IN):
        column = start + tl.arange(0, BLOCK_IN)
        inside = (column < SIZE)[None, :]
        mask = here[:, None] & inside
        place = weight_rows + column[None, :]
        weight = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
        each = column[None, :]
        x = load_sum(x_rows + each, residual_ptr, offsets + each, live & inside)
        if sum_ptr is not None:
            tl.store(sum_ptr + offsets + each, x, mask=kept & inside)
        if norm_weight_ptr is None:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            wide = x.to(tl.float32)
            squares += tl.sum(tl.reshape(wide * wide, (ROWS, BLOCK_IN // VECTOR, VECTOR)), axis=2)
            norm_weight = tl.load(norm_weight_ptr + column, mask=column < SIZE, other=0.0)
            wide *= norm_weight.to(tl.float32)[None, :]
            if x.dtype == tl.float16:  # it could overflow
                largest = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30)
                x = (wide / largest[:, None]).to(x.dtype)
                total += tl.dot(weight, tl.trans(x)) * largest[None, :]
            else:
                x = wide.to(x.dtype)
                total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
    tile = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)
    store_tile(
        total, tl.sum(squares, axis=1) if norm_weight_ptr is not None else None, eps, bias_ptr,
        out_ptr, parts_ptr, arrivals_ptr, tile, block, tl.program_id(2), out, here, row,
        num_rows, num_out, out_stride, SIZE, SPLITS, GATED,
    )  # fmt: skip


# ---- launchers --------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
    batch_invariant: bool = False,
    dependent: bool = DEPENDENT,
) -> Tensor:
    """`reference.linear`: x [M, in], weight [out, in] -> [M, out].

    Rows may have any stride; `config` overrides the tile.
    """
    parts = (x, None, None, None, 0.0, weight, bias, False)
    return _product(*parts, out, config, batch_invariant, dependent)


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    config: Config | None = None,
    batch_invariant: bool = False,
    dependent: bool = DEPENDENT,
) -> tuple[Tensor, Tensor]:
    """`reference.norm_linear`, in one launch: `linear` of the normalised sum, and the sum [M, in];
    norm_weight [in]. If `gated`, weight is [gate, up] and the first result [M, out / 2].
    """
    require.shape("norm_weight", norm_weight, x.shape[-1])
    require.contiguous(norm_weight=norm_weight)
    total = None
    if residual is not None:
        require.shape("residual", residual, *x.shape)
        require.contiguous(residual=residual)
        total = torch.empty_like(residual)
    parts = (x, residual, norm_weight, total, eps, weight, bias, gated)
    result = _product(*parts, out, config, batch_invariant, dependent)
    if residual is not None and not result.numel():
        return result, x + residual
    return result, x if total is None else total


def _product(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    total: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    gated: bool,
    out: Tensor | None,
    config: Config | None,
    batch_invariant: bool,
    dependent: bool,
) -> Tensor:
    before = {"residual": residual, "norm_weight": norm_weight}
    device = require.device(x=x, **before, weight=weight, bias=bias)
    require.same_dtype(x=x, **before)
    require.same_dtype(x=x, weight=weight, bias=bias)
    require.shape("x", x, "M", "in")
    num_rows, size = x.shape
    require.shape("weight", weight, "out", size)
    num_out = len(weight)
    require.last_contiguous(x=x, weight=weight)
    check_bias(bias, num_out)
    if gated and num_out % 2:
        raise KernelError(f"weight has {num_out} rows; gate and up must have as many each.")
    out = require.output(out, (num_rows, num_out // (1 + gated)), x)
    if not out.numel():
        return out
    rows = padded(num_rows) if num_rows > 1 else 1
    shape = (LEAST_ROWS if batch_invariant else rows, num_out, size)
    config = config or config_for(*shape, x.dtype, arch(), num_multiprocessors(device))
    block_out = max(config.block_out, 1 + gated)
    blocks = (triton.cdiv(num_rows, config.block_rows), triton.cdiv(num_out, block_out))
    options = {"VECTOR": 16 // x.element_size(), "GATED": gated} | launch_options(dependent)
    if num_rows > 1 or batch_invariant:
        others = (residual, norm_weight, total)
        options |= {"ROWS": config.block_rows}
        launch_tiles(_several_rows, blocks, x, weight, others, bias, out, (eps,), config, **options)
        return out
    _one_row[blocks[1:]](
        x, residual, norm_weight, weight, bias, out, total, eps, num_out, weight.stride(0),
        SIZE=size, BLOCK_OUT=block_out, BLOCK_IN=config.block_in, STAGES=config.num_stages,
        num_warps=config.num_warps, **options,
    )  # fmt: skip
    return out


def check_bias(bias: Tensor | None, num_out: int) -> None:
    """Check the shape and the layout of a bias."""
    if bias is not None:
        require.shape("bias", bias, num_out)
        require.contiguous(bias=bias)


def launch_tiles(
    kernel: Any,
    blocks: tuple[int, ...],
    x: Tensor,
    weight: Tensor,
    others: tuple[Tensor | None, ...],
    bias: Tensor | None,
    out: Tensor,
    numbers: tuple[float, ...],
    config: Any,
    **constants: int | bool,
) -> None:
    """Launch a kernel that computes y^T [out, M] in tiles: a program per block and split of `size`.

    Each split has whole tiles; rounding up may give fewer splits than configured. `kernel` ends
    with `store_tile`.
    """
    size, shape, device = x.shape[1], (len(x), len(weight)), out.device
    tiles = triton.cdiv(max(size, 1), config.block_in)
    split = triton.cdiv(tiles, config.splits) * config.block_in
    splits = max(1, triton.cdiv(size, split))
    parts = arrivals = None
    if splits > 1:
        parts = torch.empty(splits, shape[0], shape[1] + 16, dtype=torch.float32, device=device)
        arrivals = arrival_counters(device, padded(prod(blocks), 256))
    kernel[(*blocks, splits)](
        x, weight, *others, bias, out, parts, arrivals, *numbers, *shape, x.stride(0),
        weight.stride(0), out.stride(0), SIZE=size, SPLIT=split, SPLITS=splits,
        BLOCK_OUT=config.block_out, BLOCK_IN=config.block_in, num_warps=config.num_warps,
        num_stages=config.num_stages, **constants,
    )  # fmt: skip
