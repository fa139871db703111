"""Paged prefill attention: chunks of several query rows, and the batch-invariant mode.

The query rows of all sequences form one flat batch, whose bounds are only on the GPU. A grid of
N // BLOCK_Q + B tiles is enough for any division of N rows into B sequences; a program finds its
sequence by a binary search over `query_start`, and returns if it has no rows. The host therefore
does not synchronise. A tile holds BLOCK_Q positions with all G heads that share a KV head, as
BLOCK_Q * G rows of one matrix: a key is read once for all of them.

`prefill_kernel` processes unmasked tiles of keys separately from those on the edge of the window
and on the diagonal (FlashAttention-2: Dao, 2023). `invariant_kernel` is slower; a row's bits depend
only on its query, its position and its keys.
"""

from minillm_kernels.launch import tl, triton
from minillm_kernels.paged_decode import load_rows, locate, log2_scores, row_places
from minillm_kernels.paged_parts import TABLES, merge, splits_of, store_rows, store_tile


@triton.jit
def find_tile(query_start, index, num_sequences, BLOCK_Q: tl.constexpr):
    """Tile `index` of the grid -> its sequence, the tile's number in it, first row and row count.

    Sequence b starts at tile query_start[b] // BLOCK_Q + b, which accounts for the partly filled
    last tile of each previous sequence. The result is the last b that starts at or before `index`.
    """
    low, high = 0, num_sequences
    while low < high:
        middle = (low + high) // 2
        begin = tl.load(query_start + middle).to(tl.int32) // BLOCK_Q + middle
        low = tl.where(begin <= index, middle + 1, low)
        high = tl.where(begin <= index, high, middle)
    sequence = low - 1
    start = tl.load(query_start + sequence).to(tl.int32)
    return sequence, start, index - (start // BLOCK_Q + sequence)


@triton.jit
def attend(
    q, position, m, total, acc, k_cache, v_cache, k_strides, v_strides, table, begin, end, kv_head,
    low, high, window, scale, soft_cap,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BULK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax of BLOCK_M rows over tiles [begin, end) of BLOCK_N positions each.

    `position` [BLOCK_M] is the position of each row. Keys outside of [low, high) are not visible,
    and may belong to other sequences. All multiply-adds are explicit, so that none is contracted.
    """
    for tile in tl.range(begin, end):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (keys >= low) & (keys < high)
        block, place = locate((table, 0, None), tile, low, high, BLOCK_SIZE, BLOCK_N)
        k = load_rows(
            k_cache, k_strides, block, place, kv_head, valid,
            NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, BULK, MASKED,
        )  # fmt: skip
        products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
        scores, factor = log2_scores(products, scale, soft_cap, HAS_CAP)
        if MASKED:
            visible = (keys[None, :] <= position[:, None]) & valid[None, :]
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1) * factor)
        finite = new_m
        if MASKED:  # a row may have no visible key yet
            finite = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2(tl.fma(scores, factor, -finite[:, None]))
        rescale = tl.exp2(m - finite)  # of the previous sums
        total = tl.fma(total, rescale, tl.sum(p, 1))
        v = load_rows(
            v_cache, v_strides, block, place, kv_head, valid,
            NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, VALUE_DIM, BLOCK_DV, BULK, MASKED,
        )  # fmt: skip
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        m = new_m
    return m, total, acc


@triton.jit(do_not_specialize=[*TABLES, "table_stride", "window", "num_sequences", "few"])
def prefill_kernel(
    q, k_cache, v_cache, out, query_start, seq_lens, block_tables,
    q_strides, k_strides, v_strides, out_strides, table_stride,
    scale, soft_cap, window, num_sequences, few,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv_head): BLOCK_Q rows of one chunk, all G heads. The last tiles, which have
    the most keys, start first. Sequences with up to `few` rows are left to the decode kernel."""
    index, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence, start, number = find_tile(query_start, index, num_sequences, BLOCK_Q)
    query_len = tl.load(query_start + sequence + 1).to(tl.int32) - start
    row = number * BLOCK_Q  # the tile's first row in its sequence
    if (row >= query_len) | (query_len <= few):
        return  # no rows, or decode rows
    count = tl.minimum(query_len - row, BLOCK_Q)
    first = tl.load(seq_lens + sequence).to(tl.int32) - query_len + row  # the first row's position
    low, begin, inner, diagonal, end, high = tile_bounds(first, count, window, BLOCK_N, HAS_WINDOW)
    position = first + tl.arange(0, BLOCK_M) // GROUP
    places, inside = row_places(
        start + row, count, kv_head, q_strides, GROUP, BLOCK_M, HEAD_DIM, BLOCK_D
    )
    queries = tl.load(q + places, mask=inside, other=0.0)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
    if HAS_WINDOW:
        m, total, acc = attend(
            queries, position, m, total, acc, k_cache, v_cache, k_strides, v_strides, table,
            begin, inner, kv_head, low, high, window, scale, soft_cap, NUM_KV_HEADS, BLOCK_SIZE,
            BLOCK_N, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_WINDOW, HAS_CAP, BULK, True,
        )  # fmt: skip
    m, total, acc = attend(
        queries, position, m, total, acc, k_cache, v_cache, k_strides, v_strides, table,
        inner, diagonal, kv_head, low, high, window, scale, soft_cap, NUM_KV_HEADS, BLOCK_SIZE,
        BLOCK_N, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_WINDOW, HAS_CAP, BULK, False,
    )  # fmt: skip
    m, total, acc = attend(
        queries, position, m, total, acc, k_cache, v_cache, k_strides, v_strides, table,
        diagonal, end, kv_head, low, high, window, scale, soft_cap, NUM_KV_HEADS, BLOCK_SIZE,
        BLOCK_N, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_WINDOW, HAS_CAP, BULK, True,
    )  # fmt: skip
    store_rows(
        out, out_strides, start + row, count, kv_head, total, acc,
        GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV, 1,
    )  # fmt: skip


@triton.jit
def tile_bounds(first, count, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """The keys visible to `count` rows from position `first` on, and the tiles that need no mask.

    Keys [low, high) are visible. Tiles [begin, inner) are on the edge of the window, [inner,
    diagonal) need no mask, and [diagonal, end) are on the diagonal. A sequence of length 0 has
    negative positions and no tiles.
    """
    high = tl.maximum(first + count, 0)
    end = (high + BLOCK_N - 1) // BLOCK_N
    low, begin, inner = high * 0, high * 0, high * 0
    if HAS_WINDOW:  # the first row's window starts at `low`, the last row's at high - window
        low = tl.maximum(first - window + 1, 0)
        begin = low // BLOCK_N
        inner = tl.minimum((tl.maximum(high - window, 0) + BLOCK_N - 1) // BLOCK_N, end)
    diagonal = tl.maximum(tl.maximum(first + 1, 0) // BLOCK_N, inner)
    return low, begin, inner, diagonal, end, high


# ---- the batch-invariant mode -----------------------------------------------------------------

NUMBERS = ("table_stride", "window", "num_sequences", "num_rows", "num_splits", "few")


@triton.jit(do_not_specialize=[*TABLES, *NUMBERS])
def invariant_kernel(
    q, k_cache, v_cache, out, partial, stats, query_start, seq_lens, block_tables,
    q_strides, k_strides, v_strides, out_strides, table_stride,
    scale, soft_cap, window, num_sequences, num_rows, num_splits, few,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv_head, split): like `prefill_kernel`, for every row, batch-invariant.

    Each split (SPLIT_TILES tiles at absolute positions) has its own softmax state, and splits are
    merged in ascending order: in one program or, for sequences of up to `few` rows, by
    `combine_kernel` from one program per split. Both cases use the same machine code, because `few`
    is an argument and not a constant.
    """
    index, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence, start, number = find_tile(query_start, index, num_sequences + 1, BLOCK_Q)
    real = sequence < num_sequences  # padding rows form a sequence without positions
    following = tl.load(query_start + sequence + 1, mask=real, other=num_rows).to(tl.int32)
    query_len, row = following - start, number * BLOCK_Q
    if row >= query_len:
        return
    count = tl.minimum(query_len - row, BLOCK_Q)
    seq_len = tl.load(seq_lens + sequence, mask=real, other=0).to(tl.int32)
    first = seq_len - query_len + row
    low, begin, _, _, end, high = tile_bounds(first, count, window, BLOCK_N, HAS_WINDOW)
    split_begin, split_end = begin // SPLIT_TILES, (end + SPLIT_TILES - 1) // SPLIT_TILES
    apart = real & (query_len <= few)
    used = 1
    if apart:  # a split may have no visible keys for some rows
        start_tile, _, used = splits_of(
            seq_len, window + query_len - 1, num_splits, BLOCK_N, SPLIT_TILES, 1, HAS_WINDOW
        )
        split_begin = start_tile // SPLIT_TILES + tl.program_id(2)
        split_end = split_begin + 1
    if tl.program_id(2) >= used:
        return  # an unused split
    position = first + tl.arange(0, BLOCK_M) // GROUP
    places, inside = row_places(
        start + row, count, kv_head, q_strides, GROUP, BLOCK_M, HEAD_DIM, BLOCK_D
    )
    queries = tl.load(q + places, mask=inside, other=0.0)
    none = tl.full([BLOCK_M], float("-inf"), tl.float32)
    zero, zeros = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m, total, acc = none, zero, zeros
    table = block_tables + tl.minimum(sequence, num_sequences - 1).to(tl.int64) * table_stride
    for split in tl.range(split_begin, split_end):
        part_m, part_total, part_acc = attend(
            queries, position, none, zero, zeros, k_cache, v_cache, k_strides, v_strides, table,
            tl.maximum(split * SPLIT_TILES, begin), tl.minimum((split + 1) * SPLIT_TILES, end),
            kv_head, low, high, window, scale, soft_cap, NUM_KV_HEADS, BLOCK_SIZE,
            BLOCK_N, HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_WINDOW, HAS_CAP, BULK, True,
        )  # fmt: skip
        m, total, acc = merge(m, total, acc, part_m, part_total, part_acc, 1)
    store_tile(
        apart, partial, stats, kv_head, tl.program_id(2), sequence * few + row, num_splits, out,
        out_strides, start + row, count, m, total, acc,
        GROUP, NUM_KV_HEADS, BLOCK_M, VALUE_DIM, BLOCK_DV, 1,
    )  # fmt: skip
