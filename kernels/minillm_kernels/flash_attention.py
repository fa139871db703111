"""FlashAttention: attention of a batch of prompts without storing the matrix of scores.

**Idea** (Dao et al., 2022; Dao, 2023). A program computes `BLOCK_M` queries of one head and loops
over the keys visible to them, in tiles of `BLOCK_N`. It keeps the running maximum score of each
row, the sum of weights and the weighted sum of values. When a tile raises the maximum, both sums
are rescaled by exp(old - new). Scores stay in registers.

**Shapes.** `q` [N, H, D], `k` [S, Hkv, D], `v` [S, Hkv, Dv] -> [N, H, Dv]. The sequences of a batch
are concatenated, with bounds `query_start` and `key_start` [B + 1]; a sequence may have no queries
or no keys. H / Hkv query heads share a KV head. A sequence's last query is at its last key.

**Bytes**: (N H + S Hkv) (D + Dv) numbers. **Operations**: 2 H (D + Dv) for each visible pair of a
query and a key; a causal prompt of T tokens has T (T + 1) / 2 pairs. **Roofline**: in half
precision T H / (2 (H + Hkv)) operations per byte, 0.4 T with 32 and 8 heads; from T = 500 on an
H200 (about 180 operations per byte) is bound by its matrix units. The exponential limits how close
a kernel gets: a tile of 128 x 128 x 128 takes a Hopper's matrix units about 2048 cycles and its
exponential units 1024.

**Three ways to load tiles**, by `Config`:
* pointers: each thread prefetches 16 bytes at a time (cp.async, Ampere);
* descriptors: one thread requests a whole tile, which hardware copies and pads (TMA, Hopper);
* warp specialisation: one group of warps copies and two groups compute half of the rows each, so
  that one computes exponentials while the other uses the matrix units (Shah et al., 2024).

Tiles are counted from a sequence's first query and first key, and their sizes depend only on dtype
and head_dim: a row has the same bits in any batch.
"""

from contextvars import copy_context

import torch
from torch import Tensor

from minillm_kernels.flash_attention_config import (
    Config,
    check_arguments,
    config_of,
    kv_heads_at_once,
)
from minillm_kernels.launch import TensorDescriptor, output, padded, tl, triton

LOG2_E = 1.4426950408889634
SEARCH = tl.constexpr(256)  # sequences compared in one step of the search


# ---- kernel -----------------------------------------------------------------------------------


@triton.jit
def _find_rows(query_start, num_sequences, block, BLOCK_M: tl.constexpr):
    """The sequence of a block of rows, and the block's first row in it.

    The blocks of sequence s start at query_start[s] // BLOCK_M + s. This reserves enough blocks for
    every sequence without a prefix sum over their numbers of blocks.
    """
    sequence = -1
    for first in range(0, num_sequences, SEARCH):
        candidates = first + tl.arange(0, SEARCH)
        exists = candidates < num_sequences
        begins = tl.load(query_start + candidates, mask=exists, other=0) // BLOCK_M + candidates
        sequence += tl.sum((exists & (begins <= block)).to(tl.int32), axis=0)
    sequence = tl.maximum(sequence, 0)
    first_block = tl.load(query_start + sequence) // BLOCK_M + sequence
    return sequence, (block - first_block) * BLOCK_M


@triton.jit
def _load_tile(
    source, stride_row, stride_head, head, row, num_rows,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    RAGGED: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Load rows of one head, [ROWS, COLUMNS], zero from DIM on; if RAGGED, also from `num_rows` on.

    `source` is a pointer (RANK 0), or a descriptor of [heads, rows, dims] (RANK 3), which is
    bounded by the tensor and not by the sequence, or of one head's [rows, dims] (RANK 2).
    """
    if RANK == 3:
        tile = source.load([head, row, 0]).reshape(ROWS, COLUMNS)
    elif RANK == 2:
        tile = source.load([row, 0])
    else:
        rows = tl.arange(0, ROWS)[:, None]
        columns = tl.arange(0, COLUMNS)[None, :]
        source += row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
        source += rows * stride_row + columns
        if RAGGED:
            tile = tl.load(source, mask=(rows < num_rows) & (columns < DIM), other=0.0)
        elif DIM < COLUMNS:
            tile = tl.load(source, mask=columns < DIM, other=0.0)
        else:
            tile = tl.load(source)
    return tile


@triton.jit
def _store_tile(
    target, tile, stride_row, stride_head, head, row, num_rows,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a tile at the place where `_load_tile` would read it, except rows from `num_rows` on,
    which belong to the next sequence."""
    rows = tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    target += row.to(tl.int64) * stride_row + head.to(tl.int64) * stride_head
    target += rows * stride_row + columns
    tl.store(target, tile.to(target.dtype.element_ty), mask=(rows < num_rows) & (columns < DIM))


@triton.jit
def _rows_of_head(
    source, stride_row, stride_head, head, end,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A descriptor created in the kernel; rows from `end` on are read as zeros.

    Warp specialisation splits the rows of Q between two groups of warps, and Triton changes the
    tile shape only of descriptors that are created in the kernel.
    """
    return tl.make_tensor_descriptor(
        source + head.to(tl.int64) * stride_head, [tl.maximum(end, 1), DIM], [stride_row, 1],
        [ROWS, COLUMNS],
    )  # fmt: skip


@triton.jit
def _hide(
    scores, keys, positions, num_keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """Mask scores [BLOCK_M, BLOCK_N]: -inf where a key is not visible to a query.

    The last query is at the last key, so the causal mask also excludes keys after the sequence.
    """
    if CAUSAL:
        visible = keys[None, :] <= positions[:, None]
        if WINDOW:
            visible = visible & (keys[None, :] > positions[:, None] - window)
    else:
        visible = (keys < num_keys)[None, :]
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _attend(
    acc, row_max, row_sum, q_tile, positions, k, v, kv_head, key_begin, num_keys, begin, end,
    stride_kn, stride_kh, stride_vn, stride_vh, score_scale, exponent_scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DESCRIPTORS: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) of a sequence to the online softmax of a block of rows.

    Without MASKED, all keys of these tiles are visible to all queries.
    """
    for start in tl.range(begin, end, BLOCK_N, warp_specialize=WARP_SPECIALIZE):
        row = key_begin + start
        keys = start + tl.arange(0, BLOCK_N)
        k_tile = _load_tile(
            k, stride_kn, stride_kh, kv_head, row, num_keys - start,
            DIM, BLOCK_N, BLOCK_D, MASKED, 3 if DESCRIPTORS else 0,
        )  # fmt: skip
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if SOFT_CAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = 1 - 2 / (tl.exp2(scores * score_scale) + 1)
        if MASKED:
            scores = _hide(scores, keys, positions, num_keys, window, CAUSAL, WINDOW)
        new_max = tl.maximum(row_max, tl.max(scores, axis=1) * exponent_scale)
        base = new_max
        if MASKED:  # no visible key yet: -inf - -inf is NaN
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
        correction = tl.exp2(row_max - base)
        weights = tl.exp2(scores * exponent_scale - base[:, None])
        v_tile = _load_tile(
            v, stride_vn, stride_vh, kv_head, row, num_keys - start,
            VALUE_DIM, BLOCK_N, BLOCK_DV, MASKED, 2 if WARP_SPECIALIZE else 3 if DESCRIPTORS else 0,
        )  # fmt: skip
        if MASKED and DESCRIPTORS and not WARP_SPECIALIZE:
            # Rows after the end belong to another sequence and may be NaN; 0 * NaN is NaN.
            v_tile = tl.where((keys < num_keys)[:, None], v_tile, 0.0)
        row_sum = row_sum * correction + tl.sum(weights, axis=1)
        acc = acc * correction[:, None]
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


@triton.jit
def _key_range(
    first, last, num_keys, window,
    BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The keys that queries at positions `first` to `last` of a sequence see, in whole tiles.

    begin ..masked.. full_begin ..every query sees every key.. full_end ..masked.. end
    """
    begin = 0
    full_begin = 0
    full_end = num_keys // BLOCK_N * BLOCK_N
    end = num_keys
    if CAUSAL:
        full_end = tl.maximum(first + 1, 0) // BLOCK_N * BLOCK_N
        end = last + 1
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last - window + 1, 0), BLOCK_N) * BLOCK_N
        full_begin = tl.minimum(full_begin, full_end)
    return begin, full_begin, full_end, end


# Not specialised on sizes: compiling again for multiples of 16 would take seconds.
@triton.jit(
    do_not_specialize=["num_sequences", "num_rows", "num_blocks", "heads_at_once", "window"]
)
def _flash_attention(
    q, k, v, out, query_start, key_start, num_sequences, num_rows, num_blocks, heads_at_once,
    stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on, stride_oh,
    score_scale, exponent_scale, window, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DESCRIPTORS: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head. The last blocks, which have the most keys if causal, start
    first."""
    program, section_size = tl.program_id(0), num_blocks * heads_at_once
    block = num_blocks - 1 - program % section_size // heads_at_once
    head = program // section_size * heads_at_once + program % heads_at_once
    kv_head = head // GROUP
    sequence, first_row = _find_rows(query_start, num_sequences, block, BLOCK_M)
    query_begin = tl.load(query_start + sequence)
    num_queries = tl.load(query_start + sequence + 1) - query_begin
    key_begin = tl.load(key_start + sequence)
    num_keys = tl.load(key_start + sequence + 1) - key_begin
    if (first_row >= 0) & (first_row < num_queries):
        _attend_rows(
            q, k, v, out, head, kv_head, first_row, query_begin, num_queries, key_begin, num_keys,
            num_rows, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on,
            stride_oh, score_scale, exponent_scale, window,
            DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_M, BLOCK_N, CAUSAL, WINDOW, SOFT_CAP,
            DESCRIPTORS, WARP_SPECIALIZE,
        )  # fmt: skip


@triton.jit
def _attend_rows(
    q, k, v, out, head, kv_head, first_row, query_begin, num_queries, key_begin, num_keys,
    num_rows, stride_qn, stride_qh, stride_kn, stride_kh, stride_vn, stride_vh, stride_on,
    stride_oh, score_scale, exponent_scale, window,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DESCRIPTORS: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """Compute and store the rows of one program."""
    first = first_row + num_keys - num_queries
    last = tl.minimum(first_row + BLOCK_M, num_queries) - 1 + num_keys - num_queries
    bounds = _key_range(first, last, num_keys, window, BLOCK_N, CAUSAL, WINDOW)
    if WARP_SPECIALIZE:  # Triton 3.6 and 3.7 need a single loop without branches: mask all tiles
        bounds = bounds[0], bounds[3]
        q = _rows_of_head(q, stride_qn, stride_qh, head, num_rows, DIM, BLOCK_M, BLOCK_D)
        end = key_begin + num_keys
        v = _rows_of_head(v, stride_vn, stride_vh, kv_head, end, VALUE_DIM, BLOCK_N, BLOCK_DV)
    q_tile = _load_tile(
        q, stride_qn, stride_qh, head, query_begin + first_row, num_queries - first_row,
        DIM, BLOCK_M, BLOCK_D, True, 2 if WARP_SPECIALIZE else 3 if DESCRIPTORS else 0,
    )  # fmt: skip
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for part in tl.static_range(1 if WARP_SPECIALIZE else 3):
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q_tile, first + tl.arange(0, BLOCK_M), k, v, kv_head,
            key_begin, num_keys, bounds[part], bounds[part + 1],
            stride_kn, stride_kh, stride_vn, stride_vh, score_scale, exponent_scale, window,
            DIM, BLOCK_D, VALUE_DIM, BLOCK_DV, BLOCK_N, WARP_SPECIALIZE or part != 1,
            CAUSAL, WINDOW, SOFT_CAP, DESCRIPTORS, WARP_SPECIALIZE,
        )  # fmt: skip
    acc = acc / tl.where(row_sum == 0, 1.0, row_sum)[:, None]  # 0 for rows without visible keys
    _store_tile(
        out, acc, stride_on, stride_oh, head, query_begin + first_row, num_queries - first_row,
        VALUE_DIM, BLOCK_M, BLOCK_DV,
    )  # fmt: skip


# ---- launch -----------------------------------------------------------------------------------


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`reference.flash_attention` for head dimensions that are multiples of 8, up to 256.

    `query_start` and `key_start` are int32 and begin with 0. Rows of `q` after the last sequence
    are padding, and their results are not written. `out` [N, H, Dv] is the output tensor. Raises
    KernelError for unsupported arguments.
    """
    check_arguments(q, k, v, query_start, key_start, scale, causal, window, soft_cap)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, value_dim = v.shape[1:]
    out = output(out, (num_rows, num_heads, value_dim), q)
    num_sequences = len(query_start) - 1
    if not num_sequences or not out.numel():
        return out
    config = config_of(config, q, k, v, windowed=window is not None)
    group = num_heads // num_kv_heads
    num_blocks = num_rows // config.block_m + num_sequences  # enough for any lengths
    kv_bytes = k.shape[0] * (head_dim + value_dim) * k.element_size()
    block_d, block_dv = padded(head_dim), padded(value_dim)
    sources = (q, k, v)
    if config.descriptors:
        sources = _descriptors(q, k, v, config, block_d, block_dv)
    # exp(x) = exp2(x log2(e)); with a cap x = cap tanh(score / cap), and tanh needs exp(2 x).
    score_scale = 1.0 if soft_cap is None else 2 * LOG2_E * scale / soft_cap
    exponent_scale = LOG2_E * (scale if soft_cap is None else soft_cap)

    def launch() -> None:
        triton.set_allocator(_Scratch(q.device))
        _flash_attention[(num_blocks * num_heads,)](
            *sources, out, query_start, key_start, num_sequences, num_rows, num_blocks,
            group * kv_heads_at_once(num_kv_heads, kv_bytes),
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
            score_scale, exponent_scale, 0 if window is None else min(window, 2**30), group,
            head_dim, block_d, value_dim, block_dv, config.block_m, config.block_n,
            causal, window is not None, soft_cap is not None,
            config.descriptors, config.warp_specialize,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip

    copy_context().run(launch)  # the allocator is set in this context only
    return out


def _descriptors(
    q: Tensor, k: Tensor, v: Tensor, config: Config, block_d: int, block_dv: int
) -> tuple:
    """Descriptors of [heads, rows, dims]; a warp-specialised kernel creates those of q and v."""

    def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor.transpose(0, 1), [1, rows, columns])

    keys = describe(k, config.block_n, block_d)
    if config.warp_specialize:
        return q, keys, v
    return describe(q, config.block_m, block_d), keys, describe(v, config.block_n, block_dv)


class _Scratch:
    """Allocates memory for descriptors that a kernel creates, from torch's stream-ordered pool."""

    def __init__(self, device: torch.device):
        self.device = device

    def __call__(self, size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=self.device)
