"""Paged decode attention: a few query rows per sequence, with its keys split over the whole GPU.

A decode step reads every key and value once, for about G multiply-adds per number with a group of
G query heads. It is memory-bound, so enough bytes must be in flight (flash-decoding: Dao et al.,
2023). `decode_kernel` has the grid (B * tiles, Hkv, splits): each program attends to a split of one
sequence's positions with all G query heads that share the KV head, so that a key is read once for G
heads. It stores the state of the online softmax (Milakov and Gimelshein, 2018) in a float32
workspace: maximum m, sum of weights l, and weighted sum of values. The program that arrives last
merges all splits in ascending order, so results are reproducible, whichever program is last. A
sequence of one split needs no workspace. The batch-invariant mode merges in `combine_kernel`.

A sequence may have several queries (verification of drafts: Leviathan et al., 2023). They are
treated as additional heads of the group, each with a causal mask by its own position, so that keys
are read once for all of them. A tile holds as many queries as fit its rows, usually all of them.

Hopper's matrix instruction has at least 64 rows. With G query heads as rows (padded to 16), only
the older, slower instruction can be used. `SWAP` computes the transposed product S^T = K Q^T: 64
positions are the rows, and the G heads, padded to 16, are the columns.
"""

from minillm_kernels.launch import tl, triton
from minillm_kernels.paged_parts import TABLES, TAILS, finish, merge_rows, splits_of, store_rows

# ---- block tables -----------------------------------------------------------------------------


@triton.jit
def tail_of(tail_starts, tail_order, tail_stride, sequence):
    """Where the tail of a sequence begins, and its order."""
    return tl.load(tail_starts + sequence), tail_order + sequence.to(tl.int64) * tail_stride


@triton.jit
def in_tail(positions, needed, tail_start, tail):
    """The places of positions. Those from `tail_start` on are a path of a token tree, of which
    `tail` has the order; it is read where `needed`."""
    later = positions - tail_start
    order = tl.load(tail + later, mask=needed & (later >= 0), other=0)
    return tl.where(later >= 0, tail_start + order, positions)


@triton.jit
def locate(table, tile, low, high, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The location of KV tile `tile`: the block of each position, and its offset in the block.

    Only entries for positions in [low, high) are read, because later entries are stale. A tile
    within one block needs one lookup; its block and first offset are scalars. With a tail (`table`
    has those of `tail_of`, or 0 and None) it has many, as if blocks were of one position.
    """
    numbers, tail_start, tail = table
    first = tile * BLOCK_N
    if BLOCK_SIZE % BLOCK_N == 0 and tail is None:
        block = tl.load(numbers + first // BLOCK_SIZE).to(tl.int64)
        return block, first % BLOCK_SIZE
    else:
        positions = first + tl.arange(0, BLOCK_N)
        needed = (positions >= low) & (positions < high)
        if tail is not None:
            positions = in_tail(positions, needed, tail_start, tail)
        blocks = tl.load(numbers + positions // BLOCK_SIZE, mask=needed, other=0).to(tl.int64)
        return blocks, positions % BLOCK_SIZE


@triton.jit
def load_rows(
    cache, strides, block, place, kv_head, valid,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BULK: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys or values of a KV tile: [BLOCK_N, BLOCK_DIM], 0 in the padding of the last dimension.

    If `MASKED`, rows that are not `valid` are also 0, because a weight of 0 times NaN is NaN. If
    `BULK`, `cache` is a descriptor of [blocks * Hkv * block_size, D] and the tile is one bulk copy;
    otherwise it is a pointer, and threads copy 16 bytes each.
    """
    if BULK:
        row = (block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + place
        rows = cache.load([row.to(tl.int32), 0])
        if MASKED:
            rows = tl.where(valid[:, None], rows, 0.0)
    else:
        if BLOCK_SIZE % BLOCK_N == 0:
            place = place + tl.arange(0, BLOCK_N)
        offsets = block * strides[0] + kv_head.to(tl.int64) * strides[1] + place * strides[2]
        dims = tl.arange(0, BLOCK_DIM)
        pointers = cache + offsets[:, None] + dims[None, :]
        if MASKED:
            rows = tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)
        elif DIM != BLOCK_DIM:
            rows = tl.load(pointers, mask=(dims < DIM)[None, :], other=0.0)
        else:
            rows = tl.load(pointers)
    return rows


@triton.jit
def row_places(
    row, count, kv_head, strides, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Offsets [BLOCK_M, BLOCK_DIM] and mask of `count` rows of G heads in q or in the output.

    Row r of the matrix is head r % G of the position r // G.
    """
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DIM)
    tokens = row.to(tl.int64) + rows // GROUP
    offsets = tokens * strides[0] + (kv_head * GROUP + rows % GROUP).to(tl.int64) * strides[1]
    inside = (rows // GROUP < count)[:, None] & (dims < DIM)[None, :]
    return offsets[:, None] + dims[None, :], inside


@triton.jit
def q_of(
    q, strides, row, count, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Queries of `count` rows of G heads, [BLOCK_M, BLOCK_DIM], transposed if `SWAP`."""
    places, inside = row_places(row, count, kv_head, strides, GROUP, BLOCK_M, DIM, BLOCK_DIM)
    rows = tl.load(q + places, mask=inside, other=0.0)
    return tl.trans(rows) if SWAP else rows


# ---- the online softmax -----------------------------------------------------------------------


@triton.jit
def log2_scores(products, scale, soft_cap, HAS_CAP: tl.constexpr):
    """Products of q and k -> (scores, factor), where scores * factor are exponents of base 2.

    exp(x) is exp2(x log2(e)); `scale` includes log2(e), and the multiply-add of the exponential
    applies it. With a soft cap, `scale` is 2 log2(e) scale / cap and `soft_cap` is cap log2(e):
    cap * tanh(x) = cap * (1 - 2 / (exp(2 x) + 1)).
    """
    if HAS_CAP:
        return soft_cap * (1.0 - 2.0 / (tl.exp2(products * scale) + 1.0)), 1.0
    else:
        return products, scale


# ---- the kernels ------------------------------------------------------------------------------


@triton.jit
def attend_heads(
    q, position, m, weights, acc, k_cache, v_cache, k_strides, v_strides, table, begin, end,
    kv_head, low, high, window, scale, soft_cap,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SWAP: tl.constexpr, BULK: tl.constexpr,
    SEVERAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The online softmax of a tile of rows over tiles [begin, end) of positions.

    Scores are [rows, positions] and `acc` [rows, Dv], or both transposed (`SWAP`). `weights` sums
    the tiles' weights by position in the tile, so one reduction after the loop is enough. A single
    query attends to all of [low, high); with `SEVERAL`, each query is masked by its `position`.
    """
    AXIS: tl.constexpr = 0 if SWAP else 1  # the axis of positions
    ROWS: tl.constexpr = BLOCK_SIZE if table[2] is None else 1  # one after another
    for tile in tl.range(begin, end):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (keys >= low) & (keys < high)
        block, place = locate(table, tile, low, high, BLOCK_SIZE, BLOCK_N)
        k = load_rows(
            k_cache, k_strides, block, place, kv_head, valid,
            NUM_KV_HEADS, ROWS, BLOCK_N, HEAD_DIM, BLOCK_D, BULK, MASKED,
        )  # fmt: skip
        if SWAP:
            products = tl.dot(k, q, input_precision="ieee")  # [BLOCK_N, rows]
        else:
            products = tl.dot(q, tl.trans(k), input_precision="ieee")  # [rows, BLOCK_N]
        scores, factor = log2_scores(products, scale, soft_cap, HAS_CAP)
        if MASKED:
            visible = tl.expand_dims(valid, 1 - AXIS)
            if SEVERAL:
                each, own = tl.expand_dims(keys, 1 - AXIS), tl.expand_dims(position, AXIS)
                visible = visible & (each <= own)
                if HAS_WINDOW:
                    visible = visible & (each > own - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, AXIS) * factor)
        finite = new_m
        if MASKED and SEVERAL:  # a query may have no visible key yet
            finite = tl.where(new_m == float("-inf"), 0.0, new_m)
        p = tl.exp2(tl.fma(scores, factor, -tl.expand_dims(finite, AXIS)))
        rescale = tl.expand_dims(tl.exp2(m - finite), AXIS)  # of the previous sums
        weights = tl.fma(weights, rescale, p)
        v = load_rows(
            v_cache, v_strides, block, place, kv_head, valid,
            NUM_KV_HEADS, ROWS, BLOCK_N, VALUE_DIM, BLOCK_DV, BULK, MASKED,
        )  # fmt: skip
        if SWAP:
            acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * rescale, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * rescale, input_precision="ieee")
        m = new_m
    return m, weights, acc


@triton.jit(do_not_specialize=[*TABLES, *TAILS, "table_stride", "window", "few", "num_splits"])
def decode_kernel(
    q, k_cache, v_cache, out, partial, stats, arrivals, query_start, seq_lens, block_tables,
    tail_starts, tail_order, tail_stride, q_strides, k_strides, v_strides, out_strides,
    table_stride, scale, soft_cap, window, few, num_splits,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, SWAP: tl.constexpr, BULK: tl.constexpr,
    SPLIT: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Program (b and tile, kv_head, split): BLOCK_Q queries of a sequence, G heads each, over one
    split of its positions. Sequences with more than `few` queries are left to prefill."""
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = 0  # the tile's first query in its sequence
    if SEVERAL:
        tiles = (few + BLOCK_Q - 1) // BLOCK_Q
        sequence, row = sequence // tiles, sequence % tiles * BLOCK_Q
    start = tl.load(query_start + sequence).to(tl.int64)
    query_len = (tl.load(query_start + sequence + 1) - start).to(tl.int32)
    if (row >= query_len) | (query_len > few):
        return  # no queries, or a prefill chunk
    count = tl.minimum(query_len - row, BLOCK_Q)
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    first, size, used = splits_of(
        seq_len, window + query_len - 1, num_splits, BLOCK_N, 0, MIN_TILES, HAS_WINDOW
    )
    if SPLIT:  # noqa: SIM102 (a constant and a number known only on the GPU)
        if split >= tl.maximum(used, 1):  # an empty sequence gets zeros
            return
    first_position = seq_len - query_len + row
    begin = first + split * size
    full, end, low, high = split_bounds(
        begin, size, first_position, count, window, BLOCK_N, HAS_WINDOW
    )
    rows = q_of(q, q_strides, start + row, count, kv_head, GROUP, BLOCK_M, HEAD_DIM, BLOCK_D, SWAP)
    position = first_position + tl.arange(0, BLOCK_M) // GROUP
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_DV, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_DV], tl.float32)
    tail = (0, None)  # Triton 3.6 has no function that returns None
    if tail_order is not None:
        tail = tail_of(tail_starts, tail_order, tail_stride, sequence)
    table = (block_tables + sequence.to(tl.int64) * table_stride, tail[0], tail[1])
    m, weights, acc = attend_heads(
        rows, position, m, weights, acc, k_cache, v_cache, k_strides, v_strides, table,
        begin, full, kv_head, low, high, window, scale, soft_cap, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N,
        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_WINDOW, HAS_CAP, SWAP, BULK, SEVERAL, False,
    )  # fmt: skip
    m, weights, acc = attend_heads(
        rows, position, m, weights, acc, k_cache, v_cache, k_strides, v_strides, table,
        full, end, kv_head, low, high, window, scale, soft_cap, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N,
        HEAD_DIM, VALUE_DIM, BLOCK_D, BLOCK_DV, HAS_WINDOW, HAS_CAP, SWAP, BULK, SEVERAL, True,
    )  # fmt: skip
    AXIS: tl.constexpr = 0 if SWAP else 1
    finish(
        partial, stats, arrivals, sequence * few + row, num_splits, 0, split, used if SPLIT else 1,
        out, out_strides, start + row, count, kv_head, m, tl.sum(weights, AXIS), acc,
        GROUP, NUM_KV_HEADS, BLOCK_M, VALUE_DIM, BLOCK_DV, AXIS, merge_rows, store_rows,
    )  # fmt: skip


@triton.jit
def split_bounds(
    begin, size, first_position, count, window, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The keys visible to `count` queries in `size` tiles from `begin` on: full, end, low, high.

    Tiles [begin, full) need no mask, [full, end) do; keys outside of [low, high) are not visible.
    """
    high = first_position + count  # one after the last visible position
    end = tl.minimum(begin + size, (tl.maximum(high, 0) + BLOCK_N - 1) // BLOCK_N)
    low = 0
    full = tl.maximum(tl.minimum(end, tl.maximum(first_position + 1, 0) // BLOCK_N), begin)
    if HAS_WINDOW:
        low = tl.maximum(first_position + 1 - window, 0)
        full = begin  # few tiles: use the masked loop for all
    return full, end, low, high
