"""Norms, SwiGLU and embedding: memory-bound operations that read and write each number once.

Each loaded number is used in a few operations, so these kernels are memory-bound at every shape.
Bytes, with s bytes per number:

    rms_norm        [N, d]              2 N d s         ~4 N d operations
    add_rms_norm    [N, d]              4 N d s         instead of 5: the sum is not read again
    silu_mul        [N, 2 I] -> [N, I]  3 N I s         ~6 N I operations
    embedding       [N] -> [N, d]       2 N d s

In decode (N = 1) the launch dominates, and fusing two kernels saves a launch.

* A program keeps its rows in registers between the sum of squares and the scaling, so a row is read
  once. Only rows of more than `MOST_IN_REGISTERS` numbers are read twice, in a loop; the second
  time from the L2 cache.
* Accesses are 16 bytes per thread, two to four of them independent, so that enough bytes are in
  flight: bandwidth times latency is about 30 kB for each multiprocessor of an H200.
* Arithmetic is in float32, and rounded where torch rounds.
* A program's work depends on the width of a row and not on the number of rows, so these kernels are
  batch-invariant (He et al., Defeating Nondeterminism in LLM Inference, 2025). They are not
  specialised on the number of rows, so one binary serves all of them.

Zhang and Sennrich, Root Mean Square Layer Normalization, 2019; Shazeer, GLU Variants Improve
Transformer, 2020. The other small kernels of a layer are in `rope_cache.py`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.launch import DEBUG, INTERPRETED, KernelError, cdiv, padded, tl, triton
from minillm_kernels.rope_cache import norm_rope_write, rotate, write_cache

__all__ = [
    "Tile",
    "add_rms_norm",
    "embedding",
    "norm_rope_write",
    "rms_norm",
    "rotate",
    "silu_mul",
    "write_cache",
]

MOST_IN_REGISTERS = 16384  # longest row kept in registers; 1024 threads hold 16 numbers each
TILE = 2048  # least numbers of a program, from several rows if necessary
INTERPRETED_TILE = 16384  # the cost of an interpreted program does not depend on its size


@dataclass(frozen=True)
class Tile:
    """The work of one program: `rows` of a matrix, `block` columns at a time."""

    rows: int
    block: int
    num_warps: int


@lru_cache(maxsize=256)
def norm_tile(size: int) -> Tile:
    """Tile of whole rows of `size` numbers, or of one row in blocks if it exceeds the registers."""
    block = min(padded(size), MOST_IN_REGISTERS)
    wanted = INTERPRETED_TILE if INTERPRETED else TILE
    rows = max(1, wanted // block)
    return Tile(rows, block, num_warps=_warps(rows * block))


@lru_cache(maxsize=256)
def columns_tile(size: int) -> Tile:
    """Tile of a part of the columns; divides `size` if a large enough power of two does."""
    block = size & -size  # the largest power of two that divides
    block = min(block if block >= 128 else padded(size), TILE)
    wanted = INTERPRETED_TILE if INTERPRETED else TILE
    rows = max(1, wanted // block)
    return Tile(rows, block, num_warps=_warps(rows * block))


def _warps(numbers: int) -> int:
    """Warps for 32 numbers per thread (four 16-byte accesses in half precision).

    The largest tile has 16 per thread: 32 would exceed the 64 registers allowed on sm_100.
    """
    return max(2, numbers // (1024 if numbers < MOST_IN_REGISTERS else 512))


# ---- norms ------------------------------------------------------------------------------------


@triton.jit
def row_offsets(row, inner, stride, inner_stride):
    """Offsets of rows in two dimensions: `inner` rows, then a step of `stride`.

    Example: the heads of a token within a wider row; a plain matrix has `inner` = 1. Offsets are
    int64: 32768 tokens times 65536 columns exceed 2^31 numbers.
    """
    return (row // inner).to(tl.int64) * stride + (row % inner).to(tl.int64) * inner_stride


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    eps, num_rows, inner, x_stride, x_inner_stride, residual_stride,
    out_stride, out_inner_stride, sum_stride,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise `ROWS` rows of `SIZE` <= `BLOCK` numbers, after adding the residual if given."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows)[:, None] & (column < SIZE)
    # Prefetch the weight, which does not depend on the sum of squares.
    weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
    x_row = row_offsets(row, inner, x_stride, x_inner_stride)[:, None]
    x = tl.load(x_ptr + x_row + column, mask=mask, other=0.0)
    if residual_ptr is not None:
        residual_row = row.to(tl.int64)[:, None] * residual_stride
        residual = tl.load(residual_ptr + residual_row + column, mask=mask, other=0.0)
        # Rounded before the norm, as if it had been stored and loaded again.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        sum_row = row.to(tl.int64)[:, None] * sum_stride
        tl.store(sum_ptr + sum_row + column, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / SIZE + eps)  # numbers from SIZE on are 0
    out_row = row_offsets(row, inner, out_stride, out_inner_stride)[:, None]
    normed = x * scale[:, None] * weight
    tl.store(out_ptr + out_row + column, normed.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _long_rms_norm(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    eps, inner, x_stride, x_inner_stride, residual_stride,
    out_stride, out_inner_stride, sum_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_rms_norm` of one row that exceeds the registers: two passes over its blocks."""
    row = tl.program_id(0)
    x_ptr += row_offsets(row, inner, x_stride, x_inner_stride)
    out_ptr += row_offsets(row, inner, out_stride, out_inner_stride)
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < SIZE, other=0.0)
        if residual_ptr is not None:
            residual_row = residual_ptr + row.to(tl.int64) * residual_stride
            residual = tl.load(residual_row + column, mask=column < SIZE, other=0.0)
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
            sum_row = sum_ptr + row.to(tl.int64) * sum_stride
            tl.store(sum_row + column, x, mask=column < SIZE)
        x = x.to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares) / SIZE + eps)
    if residual_ptr is not None:
        x_ptr = sum_ptr + row.to(tl.int64) * sum_stride
        tl.debug_barrier()  # other threads of this program stored the numbers loaded next
    for start in range(0, SIZE, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=column < SIZE, other=0.0).to(tl.float32)
        normed = (x * scale * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + column, normed, mask=column < SIZE)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`reference.rms_norm`: [.., d] -> [.., d], any number of leading dimensions.

    The last dimension must be contiguous; the third from the right (with the heads of a wider row)
    may have any stride. `out` may be `x`.
    """
    require.device(x=x, weight=weight)
    require.same_dtype(x=x, weight=weight)
    size = _check_rows(x, weight)
    out = require.output(out, x.shape, x)
    if out.numel():
        _launch_norm(_as_rows("x", x), None, weight, eps, _as_rows("out", out), None, size)
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.add_rms_norm`: x and residual [N, d] -> the normalised sum and the sum, [N, d].

    `out` and `residual_out` may be `x` and `residual`, which are then overwritten.
    """
    require.device(x=x, residual=residual, weight=weight)
    require.same_dtype(x=x, residual=residual, weight=weight)
    require.shape("x", x, "N", "d")
    require.shape("residual", residual, *x.shape)
    require.last_contiguous(residual=residual)
    size = _check_rows(x, weight)
    out = require.output(out, x.shape, x)
    residual_out = require.output(residual_out, x.shape, x, "residual_out")
    if out.numel():
        rows, out_rows = x.unsqueeze(1), out.unsqueeze(1)
        _launch_norm(rows, residual, weight, eps, out_rows, residual_out, size)
    return out, residual_out


def _check_rows(x: Tensor, weight: Tensor) -> int:
    if x.dim() == 0:
        raise KernelError("x has no dimensions; it must have at least one, which is normed.")
    require.last_contiguous(x=x)
    require.shape("weight", weight, x.shape[-1])
    require.contiguous(weight=weight)
    return x.shape[-1]


def _as_rows(name: str, x: Tensor) -> Tensor:
    """View the tensor as [outer, inner, d], which two strides describe."""
    if x.dim() == 3:
        return x
    if x.dim() == 2:
        return x.unsqueeze(1)
    if not x.is_contiguous():
        raise KernelError(
            f"{name} has shape {list(x.shape)} and strides {x.stride()}; with other than two or "
            f"three dimensions it must be contiguous: call {name}.contiguous()."
        )
    return x.view(-1, 1, x.shape[-1])


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    out: Tensor,
    total: Tensor | None,
    size: int,
) -> None:
    num_rows, inner = x.shape[0] * x.shape[1], x.shape[1]
    residual_stride = 0 if residual is None else residual.stride(0)
    total_stride = 0 if total is None else total.stride(0)
    strides = (*x.stride()[:2], residual_stride, *out.stride()[:2], total_stride)
    tensors = (x, residual, weight, out, total)
    tile = norm_tile(size)
    if size > tile.block:
        _long_rms_norm[(num_rows,)](
            *tensors, eps, inner, *strides, SIZE=size, BLOCK=tile.block, num_warps=tile.num_warps,
        )  # fmt: skip
        return
    _rms_norm[(cdiv(num_rows, tile.rows),)](
        *tensors, eps, num_rows, inner, *strides, SIZE=size, ROWS=tile.rows, BLOCK=tile.block,
        num_warps=tile.num_warps,
    )  # fmt: skip


# ---- SwiGLU and embedding ---------------------------------------------------------------------


@triton.jit
def tile_of_program(SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, 1] and columns [1, BLOCK] of a program; neighbouring programs share rows."""
    program = tl.program_id(0)
    blocks = tl.cdiv(SIZE, BLOCK)
    row = (program // blocks) * ROWS + tl.arange(0, ROWS)
    column = (program % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row[:, None], column[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _silu_mul(
    gate_up_ptr, out_ptr, num_rows, stride, out_stride,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up, where a row is [gate, up] of `SIZE` numbers each."""
    row, column = tile_of_program(SIZE, ROWS, BLOCK)
    mask = (row < num_rows) & (column < SIZE)
    place = gate_up_ptr + row.to(tl.int64) * stride + column
    # These numbers are not read again: evict them from the cache first.
    gate = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
    up = tl.load(place + SIZE, mask=mask, other=0.0, eviction_policy="evict_first")
    gate32 = gate.to(tl.float32)
    activated = (gate32 / (1.0 + tl.exp(-gate32))).to(gate.dtype)  # rounded, as torch's silu is
    product = activated.to(tl.float32) * up.to(tl.float32)
    out_place = out_ptr + row.to(tl.int64) * out_stride + column
    tl.store(out_place, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`reference.silu_mul`: [.., 2 I] -> [.., I]; with more than two dimensions, contiguous."""
    require.device(gate_up=gate_up)
    require.same_dtype(gate_up=gate_up)
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2:
        raise KernelError(
            f"gate_up is {list(gate_up.shape)}; its last dimension must be even: gate, then up."
        )
    require.last_contiguous(gate_up=gate_up)
    size = gate_up.shape[-1] // 2
    out = require.output(out, (*gate_up.shape[:-1], size), gate_up)
    if not out.numel():
        return out
    rows, out_rows = _as_matrix("gate_up", gate_up), _as_matrix("out", out)
    tile = columns_tile(size)
    grid = (cdiv(rows.shape[0], tile.rows) * cdiv(size, tile.block),)
    _silu_mul[grid](
        rows, out_rows, rows.shape[0], rows.stride(0), out_rows.stride(0), SIZE=size,
        ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def _as_matrix(name: str, x: Tensor) -> Tensor:
    if x.dim() != 2:
        require.contiguous(**{name: x})
        x = x.view(-1, x.shape[-1])
    return x


@triton.jit(do_not_specialize=["num_ids"])
def _embedding(
    ids_ptr, weight_ptr, out_ptr, num_ids, num_rows, weight_stride, out_stride,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row `ids[n]` of a table of `num_rows` rows; 0 for an id outside of the table."""
    row, column = tile_of_program(SIZE, ROWS, BLOCK)
    token_id = tl.load(ids_ptr + row, mask=row < num_ids, other=-1).to(tl.int64)
    known = (token_id >= 0) & (token_id < num_rows)  # do not read outside of the table
    place = weight_ptr + token_id * weight_stride + column
    vector = tl.load(place, mask=known & (column < SIZE), other=0.0)
    out_place = out_ptr + row.to(tl.int64) * out_stride + column
    tl.store(out_place, vector, mask=(row < num_ids) & (column < SIZE))


def embedding(token_ids: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`reference.embedding`: ids [N], table [V, d] -> [N, d].

    An id outside of the table gives zeros; with MINILLM_DEBUG_KERNELS=1, a KernelError.
    """
    require.device(token_ids=token_ids, weight=weight)
    require.dtype(require.INTEGERS, token_ids=token_ids)
    require.same_dtype(weight=weight)
    require.shape("token_ids", token_ids, "N")
    require.shape("weight", weight, "V", "d")
    require.contiguous(token_ids=token_ids)
    require.last_contiguous(weight=weight)
    num_rows, size = weight.shape
    out = require.output(out, (len(token_ids), size), weight)
    if not out.numel():
        return out
    if DEBUG:
        _check_ids(token_ids, num_rows)
    tile = columns_tile(size)
    grid = (cdiv(len(token_ids), tile.rows) * cdiv(size, tile.block),)
    _embedding[grid](
        token_ids, weight, out, len(token_ids), num_rows, weight.stride(0), out.stride(0),
        SIZE=size, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
    )  # fmt: skip
    return out


def _check_ids(token_ids: Tensor, num_rows: int) -> None:
    wrong = torch.nonzero((token_ids < 0) | (token_ids >= num_rows))
    if len(wrong):
        place = int(wrong[0])
        raise KernelError(
            f"token_ids[{place}] is {int(token_ids[place])}; the table has rows 0 to "
            f"{num_rows - 1}."
        )
