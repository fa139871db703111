"""Attention over the latent cache of MLA (multi-head latent attention), decode and prefill.

DeepSeek-V2 (2024, section 2.1) caches one latent of R = 512 numbers and one rotated key of Dr = 64
per token, for all heads. With the up-projections absorbed into query and output, this is attention
with H query heads over one KV head, in which the value of a token is the first part of its key. A
tile of the cache is therefore loaded to shared memory once and multiplied twice:

    scores = q_latent . latent^T + q_rope . rope^T        [queries, keys]
    out    = softmax(scores) . latent                     [queries, R]

Shapes: `q` [N, H, R + Dr], cache [blocks, 1, block_size, R + Dr], `out` [N, H, R]. In the following
a *query* is one head of one token; a tile holds BLOCK_M queries, BLOCK_Q tokens x BLOCK_H heads.

Decode, per sequence of S positions: S (R + Dr) numbers are read once (1152 S bytes in bf16;
explicit K and V of 16 heads would take 10240 S), for 2 H S (2R + Dr) operations: 30 per byte at
H = 16, 242 at H = 128. An H200 does about 184 operations per byte: 16 heads (V2-Lite) are
memory-bound and 128 heads (V3) are compute-bound. A program takes 64 heads of V3, because with
fewer, four or more programs per sequence would read the same latents again (from the L2 cache).
Prefill is compute-bound.

Three kernels. `_decode_kernel` takes sequences with up to 16 new tokens (one, or drafts to verify:
Leviathan et al., 2023) and divides their keys into splits (flash-decoding, Dao et al., 2023).
`_combine_kernel` merges the float32 partial results in a fixed order, without atomics.
`_prefill_kernel` takes all other sequences. Both read `query_start` on the device, so the host does
not synchronise, and grids depend on shapes only, as CUDA graphs require.

A tile computes its products either as written above or transposed (`swap`). Transposed, keys
provide the 64 rows that Hopper's instructions need and 16 heads are the columns, so no row is
padding, and latents go from shared memory to the matrix units without passing through registers.

Batch-invariant mode: splits start at absolute multiples of one size, every token has the same tiles
in the same order, and splits are merged one after another by the same instructions, within one
program (prefill) or across several (decode). A tile that is visible only to other tokens adds 0,
which is exact. A token's bits depend only on its query and keys.
"""

import math
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import launch, require
from minillm_kernels.launch import tl, triton
from minillm_kernels.mla_config import (
    LEAST_TILES,
    Config,
    Tile,
    check_arguments,
    check_config,
    choose,
    count_splits,
    tensor_descriptors,
)
from minillm_kernels.mla_tiles import (
    attend,
    empty_state,
    find_queries,
    load_query,
    plan_splits,
    store_rows,
)
from minillm_kernels.paged_config import FEW
from minillm_kernels.paged_parts import merge, normalized
from minillm_kernels.paged_prefill import find_tile

# ---- kernels -------------------------------------------------------------------------------

# Triton specialises kernels on arguments that are 1 or multiples of 16. These arguments change from
# step to step, so specialisation is turned off for them.
LENGTHS = ("starts_ptr", "lens_ptr", "window")
TABLES = ("tables_ptr", "stride_table")


@triton.jit(do_not_specialize=[*LENGTHS, *TABLES, "few"])
def _decode_kernel(
    q_ptr, cache_ptr, latent_tiles, rope_tiles, starts_ptr, lens_ptr, tables_ptr, out_ptr,
    part_ptr, highest_ptr, total_ptr, stride_token, stride_head, stride_table, stride_out,
    stride_out_head, num_heads, few, window, scale, PAGE: tl.constexpr, R: tl.constexpr,
    D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SWAP: tl.constexpr, DESCRIPTORS: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
    PARTIAL: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q tokens x BLOCK_H heads of a sequence of up to `few` query tokens over one split.

    Programs of the same keys are neighbours in the grid [query tiles * head tiles, splits, B]. If
    PARTIAL, the result goes to the workspace [B, few, H, splits, R]; if not, there is one split and
    it is final.
    """
    row, split, splits = tl.program_id(2), tl.program_id(1), tl.num_programs(1)
    head_tiles = tl.cdiv(num_heads, BLOCK_H)
    first_token = tl.program_id(0) // head_tiles * BLOCK_Q
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    if (first_token >= query_len) | (query_len > few):  # no queries, or prefill
        return
    seq_len = tl.load(lens_ptr + row)
    origin, size, first, last = plan_splits(
        seq_len, query_len, window, splits, SPLIT, BLOCK_N, LEAST, WINDOW
    )
    if PARTIAL and ((split < first) | (split >= last)):  # an unused split, never read
        return
    tokens, heads, inside, places, begin, end = find_queries(
        first_token, tl.program_id(0) % head_tiles, query_len, seq_len, num_heads, window, BLOCK_Q,
        BLOCK_H, BLOCK_N, WINDOW,
    )  # fmt: skip
    q_latent, q_rope = load_query(
        q_ptr, stride_token, stride_head, start + tokens, heads, inside, R, D, BLOCK_R, BLOCK_D
    )
    begin = tl.maximum(origin + split * size, begin)
    end = tl.minimum(origin + split * size + size, end)
    highest, total, acc = attend(
        q_latent, q_rope, places, begin, end, cache_ptr, latent_tiles, rope_tiles,
        tables_ptr + row.to(tl.int64) * stride_table, window, scale, PAGE, R, D, BLOCK_R, BLOCK_D,
        BLOCK_Q * BLOCK_H, BLOCK_N, STAGES, WINDOW, SWAP, DESCRIPTORS,
    )  # fmt: skip
    if PARTIAL:
        parts = ((row * few + tokens) * num_heads + heads).to(tl.int64) * splits + split
        store_rows(part_ptr, parts * R, acc, inside, R, BLOCK_R, SWAP)
        tl.store(highest_ptr + parts, highest, mask=inside)
        tl.store(total_ptr + parts, total, mask=inside)
    else:
        acc = normalized(acc, total, 0 if SWAP else 1)
        rows = (start + tokens).to(tl.int64) * stride_out + heads * stride_out_head
        store_rows(out_ptr, rows, acc, inside, R, BLOCK_R, SWAP)


@triton.jit(do_not_specialize=[*LENGTHS, "few", "splits"])
def _combine_kernel(
    part_ptr, highest_ptr, total_ptr, starts_ptr, lens_ptr, out_ptr, stride_out, stride_out_head,
    num_heads, few, splits, window, R: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, ALL_S: tl.constexpr, WINDOW: tl.constexpr,
    SPLIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a token's head; a program computes BLOCK_R numbers of the result.

    With splits at absolute positions (SPLIT), they are merged one after another, as in
    `_prefill_kernel`. Otherwise the largest score is computed first, and then BLOCK_S splits are
    added at a time.
    """
    token, head, row = tl.program_id(0) // num_heads, tl.program_id(0) % num_heads, tl.program_id(2)
    start = tl.load(starts_ptr + row)
    query_len = tl.load(starts_ptr + row + 1) - start
    if (token >= query_len) | (query_len > few):
        return
    _, _, first, last = plan_splits(
        tl.load(lens_ptr + row), query_len, window, splits, SPLIT, BLOCK_N, LEAST, WINDOW
    )
    place = ((row * few + token) * num_heads + head).to(tl.int64) * splits
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    if SPLIT > 0:
        highest, total, acc = empty_state(1, BLOCK_R, False)
        one = tl.arange(0, 1)
        for split in tl.range(first, last, num_stages=4):
            rows = place + split + one
            part = tl.load(part_ptr + rows[:, None] * R + r[None, :], mask=(r < R)[None, :])
            part_highest, part_total = tl.load(highest_ptr + rows), tl.load(total_ptr + rows)
            highest, total, acc = merge(highest, total, acc, part_highest, part_total, part, 1)
        values = tl.reshape(normalized(acc, total, 1), [BLOCK_R])
    else:
        every = tl.arange(0, ALL_S)
        highest = tl.load(highest_ptr + place + every, mask=every < last, other=float("-inf"))
        shift = tl.maximum(tl.max(highest, 0), -1e38)  # no split at all: -inf
        total = tl.load(total_ptr + place + every, mask=every < last, other=0.0)
        total = tl.sum(total * tl.exp2(highest - shift), 0)
        values = tl.zeros([BLOCK_R], tl.float32)
        for split in tl.range(0, last, BLOCK_S):
            some = split + tl.arange(0, BLOCK_S)
            inside = (some < last)[:, None] & (r < R)[None, :]
            rows = (place + some)[:, None] * R
            part = tl.load(part_ptr + rows + r[None, :], mask=inside, other=0.0)
            score = tl.load(highest_ptr + place + some, mask=some < last, other=float("-inf"))
            values += tl.sum(part * tl.exp2(score - shift)[:, None], 0)
        values = values / tl.where(total > 0.0, total, 1.0)  # 0 without visible keys
    rows = out_ptr + (start + token).to(tl.int64) * stride_out + head * stride_out_head
    tl.store(rows + r, values.to(out_ptr.dtype.element_ty), mask=r < R)


@triton.jit(do_not_specialize=[*LENGTHS, *TABLES, "few", "num_rows"])
def _prefill_kernel(
    q_ptr, cache_ptr, latent_tiles, rope_tiles, starts_ptr, lens_ptr, tables_ptr, out_ptr,
    stride_token, stride_head, stride_table, stride_out, stride_out_head, num_rows, num_heads,
    few, window, scale, PAGE: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SWAP: tl.constexpr, DESCRIPTORS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q tokens x BLOCK_H heads of one sequence over all visible keys.

    Sequences of up to `few` query tokens are left to `_decode_kernel`. The last tiles, which have
    the most keys, start first.
    """
    head_tiles = tl.cdiv(num_heads, BLOCK_H)
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // head_tiles
    row, start, number = find_tile(starts_ptr, tile, num_rows, BLOCK_Q)
    first_token = number * BLOCK_Q
    query_len = tl.load(starts_ptr + row + 1).to(tl.int32) - start
    if (first_token >= query_len) | (query_len <= few):
        return
    BLOCK_M: tl.constexpr = BLOCK_Q * BLOCK_H
    tokens, heads, inside, places, begin, end = find_queries(
        first_token, tl.program_id(0) % head_tiles, query_len, tl.load(lens_ptr + row), num_heads,
        window, BLOCK_Q, BLOCK_H, BLOCK_N, WINDOW,
    )  # fmt: skip
    q_latent, q_rope = load_query(
        q_ptr, stride_token, stride_head, start + tokens, heads, inside, R, D, BLOCK_R, BLOCK_D
    )
    table_ptr = tables_ptr + row.to(tl.int64) * stride_table
    state = empty_state(BLOCK_M, BLOCK_R, SWAP)
    if SPLIT > 0:
        for split in tl.range(begin // SPLIT, tl.cdiv(end, SPLIT)):
            low, high = tl.maximum(split * SPLIT, begin), tl.minimum(split * SPLIT + SPLIT, end)
            part = attend(
                q_latent, q_rope, places, low, high, cache_ptr, latent_tiles, rope_tiles,
                table_ptr, window, scale, PAGE, R, D, BLOCK_R, BLOCK_D, BLOCK_M, BLOCK_N, STAGES,
                WINDOW, SWAP, DESCRIPTORS,
            )  # fmt: skip
            highest, total, acc = merge(
                state[0], state[1], state[2], part[0], part[1], part[2], 0 if SWAP else 1
            )
            state = (highest, total, acc)
    else:
        state = attend(
            q_latent, q_rope, places, begin, end, cache_ptr, latent_tiles, rope_tiles, table_ptr,
            window, scale, PAGE, R, D, BLOCK_R, BLOCK_D, BLOCK_M, BLOCK_N, STAGES, WINDOW, SWAP,
            DESCRIPTORS,
        )  # fmt: skip
    _, total, acc = state
    rows = (start + tokens).to(tl.int64) * stride_out + heads * stride_out_head
    store_rows(out_ptr, rows, normalized(acc, total, 0 if SWAP else 1), inside, R, BLOCK_R, SWAP)


# ---- launching -----------------------------------------------------------------------------


def mla_attention(
    q: Tensor,
    latent_cache: Tensor,
    value_dim: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    *,
    max_query_len: int | None = None,
    batch_invariant: bool = False,
    out: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """`reference.mla_attention`: `q` [N, H, R + Dr] -> [N, H, R].

    `latent_cache` [blocks, 1, block_size, R + Dr] is contiguous; `query_start` int32 or int64
    [B + 1], `seq_lens` [B] and `block_tables` [B, M] likewise. `max_query_len` is an upper bound of
    the query lengths; up to 16, only the decode kernel is launched. With `batch_invariant`, a
    token's bits do not depend on the batch, nor on how its sequence is chunked. Rows of `out` after
    the last sequence are not written. Raises KernelError for unsupported arguments.
    """
    require.attention(scale, window, None, max_query_len)
    out = check_arguments(q, latent_cache, value_dim, query_start, seq_lens, block_tables, out)
    num_tokens, num_heads, width = q.shape
    num_rows, page = len(seq_lens), latent_cache.shape[2]
    if not num_tokens or not num_rows:
        return out
    few = max_query_len if max_query_len is not None and max_query_len <= FEW else 0
    if config is None:
        config = choose(launch.arch(), q.dtype, num_heads, page, batch_invariant, max(few, 1))
        config = config.fit(latent_cache, value_dim)
    check_config(config, page, value_dim, width - value_dim)
    if not few and (max_query_len is None or num_rows > 1):  # beside chunks: what one tile holds
        few = min(config.decode.block_q, FEW)
    positions, processors = block_tables.shape[1] * page, launch.num_multiprocessors(q.device)
    splits = count_splits(config, num_rows, num_heads, positions, processors, max(few, 1))
    # With splits at absolute positions, one program per tile gives the same bits and needs no
    # workspace.
    if config.split and 4 * num_rows * few * num_heads * splits * value_dim > config.max_workspace:
        few = 0
    arguments = (q, latent_cache, value_dim, query_start, seq_lens, block_tables, out)
    scale *= math.log2(math.e)  # the kernels compute exp as exp2
    window = None if window is None else min(window, 2**31 - 1 - FEW)  # int32 in the kernels
    if few:
        _decode(arguments, config, few, splits, scale, window)
    if max_query_len is None or max_query_len > few:
        _prefill(arguments, config, few, scale, window)
    return out


def _shared(arguments: tuple[Any, ...], tile: Tile, window: int | None) -> dict[str, Any]:
    """The arguments of both kernels."""
    q, latent_cache, value_dim, _, _, _, _ = arguments
    rope_dim = q.shape[2] - value_dim
    return {
        "PAGE": latent_cache.shape[2],
        "R": value_dim,
        "D": rope_dim,
        "BLOCK_R": launch.padded(value_dim),
        "BLOCK_D": launch.padded(rope_dim),
        "BLOCK_Q": tile.block_q,
        "BLOCK_H": tile.block_h,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
        "WINDOW": window is not None,
        "SWAP": tile.swap,
        "DESCRIPTORS": tile.descriptors,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _decode(
    arguments: tuple[Any, ...],
    config: Config,
    few: int,
    splits: int,
    scale: float,
    window: int | None,
) -> None:
    """Launch the decode and combine kernels for sequences of up to `few` query tokens."""
    q, latent_cache, value_dim, query_start, seq_lens, block_tables, out = arguments
    num_heads, num_rows, tile = q.shape[1], len(seq_lens), config.decode
    part = highest = total = None
    if splits > 1:
        part = q.new_empty((num_rows, few, num_heads, splits, value_dim), dtype=torch.float32)
        highest = q.new_empty((num_rows, few, num_heads, splits), dtype=torch.float32)
        total = torch.empty_like(highest)
    tiles = triton.cdiv(few, tile.block_q) * triton.cdiv(num_heads, tile.block_h)
    _decode_kernel[(tiles, splits, num_rows)](
        q, latent_cache, *tensor_descriptors(latent_cache, value_dim, tile), query_start, seq_lens,
        block_tables, out, part, highest, total, q.stride(0), q.stride(1), block_tables.stride(0),
        out.stride(0), out.stride(1), num_heads, few, window or 0, scale, SPLIT=config.split,
        LEAST=LEAST_TILES, PARTIAL=splits > 1, **_shared(arguments, tile, window),
    )  # fmt: skip
    if splits == 1:
        return
    block_r = min(launch.padded(value_dim), 512 if launch.INTERPRETED else 128)
    _combine_kernel[(few * num_heads, triton.cdiv(value_dim, block_r), num_rows)](
        part, highest, total, query_start, seq_lens, out, out.stride(0), out.stride(1), num_heads,
        few, splits, window or 0, R=value_dim, BLOCK_R=block_r, BLOCK_N=tile.block_n,
        BLOCK_S=min(32, launch.padded(splits)), ALL_S=launch.padded(splits),
        WINDOW=window is not None, SPLIT=config.split, LEAST=LEAST_TILES, num_warps=4,
    )  # fmt: skip


def _prefill(
    arguments: tuple[Any, ...], config: Config, few: int, scale: float, window: int | None
) -> None:
    """Launch the prefill kernel for sequences of more than `few` query tokens."""
    q, latent_cache, value_dim, query_start, seq_lens, block_tables, out = arguments
    (num_tokens, num_heads), num_rows, tile = q.shape[:2], len(seq_lens), config.prefill
    query_tiles = num_tokens // tile.block_q + num_rows
    _prefill_kernel[(query_tiles * triton.cdiv(num_heads, tile.block_h),)](
        q, latent_cache, *tensor_descriptors(latent_cache, value_dim, tile), query_start, seq_lens,
        block_tables, out, q.stride(0), q.stride(1), block_tables.stride(0), out.stride(0),
        out.stride(1), num_rows, num_heads, few, window or 0, scale,
        SPLIT=config.split, **_shared(arguments, tile, window),
    )  # fmt: skip
