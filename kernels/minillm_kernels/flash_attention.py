"""FlashAttention, a kernel for reading: prompts without storing the matrix of their scores.

A program computes a block of queries of one head and loops over the keys visible to them, in tiles
(Dao et al., 2022; Dao, 2023). It keeps the largest score of each row so far, the sum of weights and
the weighted sum of values. When a tile raises the largest score, both sums are rescaled by
exp(old - new). Tiles behind the diagonal are skipped, and only those on it have a mask.

Bytes: (N H + S Hkv) (D + Dv) numbers. Operations: 2 H (D + Dv) for each visible pair of a query and
a key; a causal prompt of T tokens has T (T + 1) / 2 pairs. In half precision that is
T H / (2 (H + Hkv)) operations per byte: from T = 500 on, matrix units are the bound.

The engine computes prompts with `paged_prefill.py`: the same loop on a paged cache, with all heads
of a group in one tile, bulk copies, windows and soft caps.
"""

import torch
from torch import Tensor

from minillm_kernels import launch, require
from minillm_kernels.launch import KernelError, padded, tl, triton

LOG2_E = 1.4426950408889634


@triton.jit
def _tile(row, count, strides, head, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets of `ROWS` rows of a head from `row` on, [ROWS, BLOCK]; only `count` rows are ours."""
    rows, columns = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    offsets = (row + rows).to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + columns
    return offsets, (rows < count) & (columns < DIM)


@triton.jit
def _key_range(first, last, num_keys, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """For queries at positions `first` to `last`: keys [0, full) are visible to all of them, in
    whole tiles; keys [full, end) need a mask; tiles from `end` on are skipped."""
    full, end = num_keys, num_keys
    if CAUSAL:
        full, end = tl.maximum(first + 1, 0), last + 1
    return full // BLOCK * BLOCK, end


@triton.jit
def _flash_attention(
    q, k, v, out, query_start, key_start, q_strides, k_strides, v_strides, out_strides, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """Program (block, head, sequence). The last blocks, which have the most keys, start first."""
    head, sequence = tl.program_id(1), tl.program_id(2)
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK
    query_begin, key_begin = tl.load(query_start + sequence), tl.load(key_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - query_begin
    num_keys = tl.load(key_start + sequence + 1) - key_begin
    count = tl.minimum(num_queries - first_row, BLOCK)
    if count <= 0:
        return
    first = first_row + num_keys - num_queries  # a position: the last query is at the last key
    positions = first + tl.arange(0, BLOCK)
    row = query_begin + first_row
    places, inside = _tile(row, count, q_strides, head, BLOCK, DIM, BLOCK_D)
    q_tile = tl.load(q + places, mask=inside, other=0.0)
    acc = tl.zeros([BLOCK, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK], tl.float32)
    full, end = _key_range(first, first + count - 1, num_keys, BLOCK, CAUSAL)
    for masked in tl.static_range(2):  # first the tiles that need no mask
        for start in tl.range(full if masked else 0, end if masked else full, BLOCK):
            key, left = key_begin + start, num_keys - start
            k_at, k_here = _tile(key, left, k_strides, head // GROUP, BLOCK, DIM, BLOCK_D)
            k_tile = tl.load(k + k_at, mask=k_here, other=0.0)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
            if masked:
                keys = start + tl.arange(0, BLOCK)
                visible = (keys < num_keys)[None, :]
                if CAUSAL:
                    visible = keys[None, :] <= positions[:, None]
                scores = tl.where(visible, scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf: no visible key yet
            correction = tl.exp2(row_max - base)
            weights = tl.exp2(scores - base[:, None])
            # Rows after the end belong to another sequence and may be NaN, and 0 * NaN is NaN.
            # Other names than for k: a variable of a loop has one shape.
            v_at, v_here = _tile(key, left, v_strides, head // GROUP, BLOCK, VALUE_DIM, BLOCK_DV)
            v_tile = tl.load(v + v_at, mask=v_here, other=0.0)
            row_sum = row_sum * correction + tl.sum(weights, axis=1)
            acc = acc * correction[:, None]
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
            row_max = new_max
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]  # 0 for rows without visible keys
    places, inside = _tile(row, count, out_strides, head, BLOCK, VALUE_DIM, BLOCK_DV)
    tl.store(out + places, acc.to(out.dtype.element_ty), mask=inside)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    scale: float,
    causal: bool = True,
    *,
    out: Tensor | None = None,
    block: int | None = None,
) -> Tensor:
    """`reference.flash_attention` (q [N, H, D] -> [N, H, Dv]) without windows and soft caps.

    A tile has `block` queries and as many keys. Raises KernelError for unsupported arguments.
    """
    tensors, starts = {"q": q, "k": k, "v": v}, {"query_start": query_start, "key_start": key_start}
    require.device(**tensors, **starts)
    require.same_dtype(**tensors)
    require.dtype((torch.int32,), **starts)
    require.shape("q", q, "N", "H", "D")
    require.shape("k", k, "S", "Hkv", q.shape[2])
    require.shape("v", v, *k.shape[:2], "Dv")
    require.shape("key_start", key_start, "B + 1")
    require.shape("query_start", query_start, len(key_start))
    require.last_contiguous(**tensors)
    require.contiguous(**starts)
    require.starts("query_start", query_start, len(q))
    require.starts("key_start", key_start, len(k))
    (num_rows, num_heads, head_dim), value_dim = q.shape, v.shape[2]
    require.head_dim("q", head_dim)
    require.head_dim("v", value_dim)
    group = require.groups(num_heads, k.shape[1])
    out = require.output(out, (num_rows, num_heads, value_dim), q)
    if block is None:
        # The largest tiles that fit into registers; the interpreter's cost is per operation.
        compiled = 16 if q.itemsize == 4 else 32 if max(head_dim, value_dim) > 64 else 64
        block = 128 if launch.INTERPRETED else compiled
    if block < 16 or padded(block) != block:
        raise KernelError(f"block is {block}; it must be a power of two and at least 16.")
    if len(query_start) > 1 and out.numel():
        # Lengths are only on the device: blocks behind the end of a sequence return at once.
        _flash_attention[(triton.cdiv(num_rows, block), num_heads, len(query_start) - 1)](
            *(q, k, v, out, query_start, key_start),
            *(q.stride()[:2], k.stride()[:2], v.stride()[:2], out.stride()[:2], scale * LOG2_E),
            *(group, head_dim, value_dim, padded(head_dim), padded(value_dim), block, causal),
            num_warps=4 if q.itemsize == 2 else 8,
            num_stages=2,
        )
    return out
