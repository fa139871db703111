"""Attention over a KV cache of 8-bit codes, and writing it: `int8_cache` with the same bits.

A page has half the bytes of a 16-bit one: 2 (D + 2) per token and head. Products are sums of
integers, which matrix units compute exactly in any order; float32 is computed number by number, in
the reference's order. Multiply-adds are explicit (`enable_fp_fusion=False`), quotients are rounded
once, `powers` takes the place of the hardware's exponential, and sums are trees of halves.

The bits of a query depend on its position only, so one kernel serves decode, verification and
chunks of prompts. A program attends with all G heads of some queries of a sequence that share a KV
head. Sums of each part (8 of 128 positions, then of 512) are joined in ascending order: in
registers or, for sequences of few queries, by the last program of one per part. The pages
interleave four positions, as a CPU reads them: a tile is 16 contiguous rows of 4 D bytes, which
registers rearrange.

In decode, a page's bytes are read once, for 4 G operations on a code: memory-bound.
"""

from functools import cache

import torch
from torch import Tensor

from minillm_kernels import require
from minillm_kernels.int8_cache import FIRST_PARTS, LATER_PART, LOG2_E, PART
from minillm_kernels.int8_tiles import attention_kernel, largest_of, rounded
from minillm_kernels.launch import KernelError, Tails, arch, arrival_counters, padded, tl, triton
from minillm_kernels.paged_attention import MAX_GRID_Z, MAX_GROUP, MAX_WORKSPACE
from minillm_kernels.paged_config import FEW
from minillm_kernels.rope_cache import (
    NUM_WARPS,
    check_prologue,
    check_slots,
    rotate_queries,
    rotated_heads,
    rows_of_program,
    slot_places,
)

MAX_WINDOW = 2**30  # positions are int32 numbers
WRITE_TILE = 2048  # numbers of a program that writes


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    *,
    max_query_len: int | None = None,
    tails: Tails | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`int8_cache.paged_attention`: q [N, H, D], contiguous codes and scales -> [N, H, D].

    `max_query_len` is an upper bound of the query rows of a sequence, if given; `tails` (launch.py)
    gives the order of the last keys. Padding rows are not written. Raises KernelError for
    unsupported arguments.
    """
    _check_pages(q, k_cache, v_cache, k_scale, v_scale)
    require.attention(scale, window, None, max_query_len)
    group = require.groups(q.shape[1], k_cache.shape[1], MAX_GROUP)
    require.sequences(q, k_cache, query_start, seq_lens, block_tables)
    out = require.output(out, q.shape, q)
    (count, heads, dim), (_, kv_heads, block_size, _) = q.shape, k_cache.shape
    num_sequences, block_d = len(seq_lens), padded(dim, 32)
    if not count or not num_sequences:
        return out
    num_parts = _num_parts(block_tables.shape[1] * block_size)
    window = min(MAX_WINDOW if window is None else window, MAX_WINDOW)
    few, small = _few(group, max_query_len)
    room = num_sequences * few * heads * num_parts * dim
    few = few if 1 < num_parts <= MAX_GRID_Z and room <= MAX_WORKSPACE else 0
    shapes = ((num_sequences, few, heads, num_parts, size) for size in (dim, 2))
    partial, stats = (q.new_empty(shape, dtype=torch.float32) for shape in shapes)

    def launch(block_m: int, apart: bool) -> None:
        block_q = block_m // group
        grid = (count // block_q + num_sequences, kv_heads, num_parts if apart else 1)
        arrivals = arrival_counters(q.device, padded(grid[0] * kv_heads if apart else 1, 256))
        attention_kernel[grid](
            q, k_cache, v_cache, k_scale, v_scale, out, partial, stats, arrivals, query_start,
            seq_lens, block_tables, *require.tail_arguments(tails, num_sequences), q.stride()[:-1],
            out.stride()[:-1], block_tables.stride(0), _factor(scale), window, num_sequences, few,
            num_parts, GROUP=group, NUM_KV_HEADS=kv_heads, BLOCK_SIZE=block_size, BLOCK_M=block_m,
            BLOCK_Q=block_q, DIM=dim, BLOCK_D=block_d, APART=apart,
            num_warps=4 if block_m * block_d <= 4096 else 8, num_stages=2,
            enable_fp_fusion=False,
        )  # fmt: skip

    if max_query_len is None or max_query_len > few:
        large = small if max_query_len is not None and max_query_len <= FEW else 64
        most = 64 if block_d <= (128 if arch() == 90 else 64) else 32  # without spilled registers
        launch(max(min(large, most), padded(group)), apart=False)
    if few:
        launch(small, apart=True)
    return out


@cache
def _factor(scale: float) -> float:
    """`scale` for powers of 2, as the reference rounds it."""
    return float(torch.tensor(scale, dtype=torch.float32) * LOG2_E)


def _few(group: int, max_query_len: int | None) -> tuple[int, int]:
    """The most queries of a sequence whose parts are programs of their own, and their tile's rows:
    all of them, or as many as fit the smallest tile if there are chunks, too."""
    one = padded(group)
    if max_query_len is None or max_query_len > FEW:
        return min(one // group, FEW), one
    return max_query_len, max(one, min(padded(group * max_query_len), 32))


def _num_parts(positions: int) -> int:
    """Parts of as many positions."""
    later = max(positions - FIRST_PARTS * PART, 0)
    return max(min(-(-positions // PART), FIRST_PARTS) + -(-later // LATER_PART), 1)


def _check_pages(x: Tensor, k_cache: Tensor, v_cache: Tensor, *scales: Tensor) -> None:
    """Check heads x [N, H, D], and pages for them."""
    k_scale, v_scale = scales
    require.device(x=x, k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale)
    require.same_dtype(x=x)
    require.dtype((torch.uint8,), k_cache=k_cache)
    require.dtype((torch.int8,), v_cache=v_cache)
    require.dtype((torch.float16,), k_scale=k_scale, v_scale=v_scale)
    require.shape("x", x, "N", "H", "D")
    require.last_contiguous(x=x)
    require.head_dim("x", x.shape[2])
    require.shape("k_cache", k_cache, "blocks", "Hkv", "block_size", x.shape[2])
    require.shape("v_cache", v_cache, *k_cache.shape)
    require.shape("k_scale", k_scale, *k_cache.shape[:3])
    require.shape("v_scale", v_scale, *k_cache.shape[:3])
    require.contiguous(k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale)
    if k_cache.shape[2] % 4 or not k_cache.shape[2]:
        raise KernelError(
            f"k_cache has blocks of {k_cache.shape[2]} positions; it must be a multiple of 4."
        )


# ---- writing ----------------------------------------------------------------------------------


@triton.jit
def scale_of(most):
    """The scale of rows [ROWS] whose largest number is `most`: [ROWS, 1], in float16 rounded up."""
    wanted = tl.div_rn(most, 127.0)[:, None]
    scale = wanted.to(tl.float16)
    above = (scale.to(tl.float32) < wanted).to(tl.int16)  # rounded up
    scale = (scale.to(tl.int16, bitcast=True) + above).to(tl.float16, bitcast=True)
    return tl.where(wanted <= 65504.0, scale.to(tl.float32), float("inf"))


@triton.jit
def store_codes(x, scale, dims, cache, place, mask, DIM: tl.constexpr, KEYS: tl.constexpr):
    """Store the codes of numbers [ROWS, n] of rows, at `dims` [1, n] of positions [ROWS, 1]."""
    divides = (scale > 0.0) & (scale < float("inf"))
    codes = rounded(tl.div_rn(x, tl.where(divides, scale, 1.0)))
    codes = tl.where(divides, codes, 0.0).to(tl.int32)
    side = place % 4
    if KEYS:
        codes, offsets = codes + 128, 4 * side + dims // 4 * 16 + dims % 4
    else:
        offsets = side + dims * 4
    target = cache + (place - side) * DIM + offsets
    tl.store(target, codes.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def write_rows(
    source, cache, scales, place, kept, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """`int8_cache.quantize` of rows at `source` [ROWS, 1], stored at positions `place` of pages."""
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = kept & (dims < DIM)
    x = tl.load(source + dims, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(largest_of(x))
    store_codes(x, scale, dims, cache, place, mask, DIM, KEYS)
    tl.store(scales + place, scale.to(tl.float16), mask=kept)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_blocks"])
def write_kernel(
    key, value, k_cache, v_cache, k_scale, v_scale, slots, key_strides, value_strides, num_rows,
    num_slots, num_blocks, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Program p: ROWS heads of keys and of values. A row without a slot is padding."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    token, head = (row // NUM_KV_HEADS).to(tl.int64), (row % NUM_KV_HEADS).to(tl.int64)
    block, offset, kept = slot_places(
        slots, token, row < num_rows, num_slots, num_blocks, BLOCK_SIZE
    )
    place = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset
    source = key + token * key_strides[0] + head * key_strides[1]
    write_rows(source, k_cache, k_scale, place, kept, DIM, BLOCK_D, True)
    source = value + token * value_strides[0] + head * value_strides[1]
    write_rows(source, v_cache, v_scale, place, kept, DIM, BLOCK_D, False)


def write_cache(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """`int8_cache.write_cache` of keys and values [N, Hkv, D], views with any strides but the last.

    Slots must be distinct; one outside of the cache is skipped. Raises KernelError.
    """
    _check_pages(key, k_cache, v_cache, k_scale, v_scale)
    require.shape("key", key, "N", *k_cache.shape[1::2])
    require.shape("value", value, *key.shape)
    require.device(key=key, value=value, slot_mapping=slot_mapping)
    require.same_dtype(key=key, value=value)
    require.last_contiguous(value=value)
    check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[2])
    count, kv_heads, dim = key.shape
    if not count:
        return
    rows = max(1, WRITE_TILE // padded(dim))
    write_kernel[(triton.cdiv(count * kv_heads, rows),)](
        key, value, k_cache, v_cache, k_scale, v_scale, slot_mapping, key.stride()[:-1],
        value.stride()[:-1], count * kv_heads, len(slot_mapping), len(k_cache),
        NUM_KV_HEADS=kv_heads, BLOCK_SIZE=k_cache.shape[2], DIM=dim, BLOCK_D=padded(dim), ROWS=rows,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


# ---- norm, rotation and writing ---------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens", "num_slots", "num_blocks"])
def rope_write_kernel(
    qkv, q_weight, k_weight, cos, sin, slots, q, k_cache, v_cache, k_scale, v_scale,
    eps, num_tokens, num_slots, num_blocks,
    qkv_stride, qkv_head_stride, cos_stride, sin_stride, q_stride, q_head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Programs of q, then those of k, then as many of v: ROWS heads each."""
    program, row = tl.program_id(0), tl.arange(0, ROWS)[:, None]
    q_programs = tl.cdiv(num_tokens * NUM_HEADS, ROWS)
    kv_programs = tl.cdiv(num_tokens * NUM_KV_HEADS, ROWS)
    if program < q_programs:
        rotate_queries(
            row + program * ROWS, qkv, q_weight, cos, sin, q, eps, num_tokens,
            qkv_stride, qkv_head_stride, cos_stride, sin_stride, q_stride, q_head_stride,
            NUM_HEADS, DIM, HALF, INTERLEAVED,
        )  # fmt: skip
    else:
        row += (program - q_programs) % kv_programs * ROWS
        token, head = row // NUM_KV_HEADS, (row % NUM_KV_HEADS).to(tl.int64)
        block, offset, kept = slot_places(
            slots, token, token < num_tokens, num_slots, num_blocks, BLOCK_SIZE
        )
        place = (block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset
        source = qkv + token.to(tl.int64) * qkv_stride + (NUM_HEADS + head) * qkv_head_stride
        if program < q_programs + kv_programs:
            first, second = rotated_heads(
                source, token, kept, k_weight, eps, cos, sin, cos_stride, sin_stride,
                DIM, HALF, INTERLEAVED,
            )  # fmt: skip
            dtype: tl.constexpr = qkv.dtype.element_ty  # rounded, as if stored before
            first, second = first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
            scale = scale_of(tl.maximum(largest_of(first), largest_of(second)))
            pair = tl.arange(0, HALF)[None, :]
            mask = kept & (pair < DIM // 2)
            store_codes(first, scale, pair, k_cache, place, mask, DIM, True)
            store_codes(second, scale, DIM // 2 + pair, k_cache, place, mask, DIM, True)
            tl.store(k_scale + place, scale.to(tl.float16), mask=kept)
        else:
            source += NUM_KV_HEADS * qkv_head_stride
            write_rows(source, v_cache, v_scale, place, kept, DIM, 2 * HALF, False)


def norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """`reference.norm_rope_write` to pages of codes: qkv [N, H + 2 Hkv, D] -> q [N, H, D].

    The queries of padding rows (slot -1 or none) are written, and are undefined.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    _check_pages(qkv, k_cache, v_cache, k_scale, v_scale)
    require.device(qkv=qkv, **weights, cos=cos, sin=sin, slot_mapping=slot_mapping)
    require.same_dtype(qkv=qkv, **weights)
    (count, _, dim), kv_heads = qkv.shape, k_cache.shape[1]
    heads = check_prologue(qkv, weights, cos, sin, kv_heads)
    check_slots(slot_mapping, k_cache.shape[0] * k_cache.shape[2])
    out = qkv.new_empty(count, heads, dim)
    if not count:
        return out
    rows = rows_of_program(dim)
    programs = triton.cdiv(count * heads, rows) + 2 * triton.cdiv(count * kv_heads, rows)
    rope_write_kernel[(programs,)](
        qkv, q_weight, k_weight, cos, sin, slot_mapping, out, k_cache, v_cache, k_scale, v_scale,
        eps, count, len(slot_mapping), len(k_cache), *qkv.stride()[:2], cos.stride(0),
        sin.stride(0), *out.stride()[:2], NUM_HEADS=heads, NUM_KV_HEADS=kv_heads, DIM=dim,
        HALF=padded(dim) // 2, BLOCK_SIZE=k_cache.shape[2], ROWS=rows, INTERLEAVED=interleaved,
        num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
