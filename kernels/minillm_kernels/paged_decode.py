"""Paged decode attention: a few query rows per sequence, with its keys split over the whole GPU.

A decode step reads every key and value once, for about G multiply-adds per number with a group of
G query heads. It is memory-bound, so enough bytes must be in flight. Two kernels (flash-decoding:
Dao et al., 2023):

1. `decode_kernel`, grid (B * tiles, Hkv, splits): each program attends to a split of one sequence's
   positions with all G query heads that share the KV head, so that a key is read once for G heads.
   It stores the state of the online softmax (Milakov and Gimelshein, 2018) in a float32 workspace:
   maximum m, sum of weights l, and weighted sum of values.
2. `combine_kernel`, grid (B * queries, H): merges the splits in ascending order, without atomics,
   so that results are reproducible. With one split, the first kernel writes the result itself.

A sequence may have several queries (verification of drafts: Leviathan et al., 2023). They are
treated as additional heads of the group, each with a causal mask by its own position, so that keys
are read once for all of them. A tile holds as many queries as fit its rows, usually all of them.

Hopper's matrix instruction has at least 64 rows. With G query heads as rows (padded to 16), only
the older, slower instruction can be used. `SWAP` computes the transposed product S^T = K Q^T: 64
positions are the rows, and the G heads, padded to 16, are the columns.
"""

from minillm_kernels.launch import tl, triton

# ---- block tables -----------------------------------------------------------------------------


@triton.jit
def locate(table, tile, low, high, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The location of KV tile `tile`: the block of each position, and its offset in the block.

    Only entries for positions in [low, high) are read, because later entries are stale. A tile
    within one block needs one lookup; its block and first offset are scalars.
    """
    first = tile * BLOCK_N
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + first // BLOCK_SIZE).to(tl.int64)
        return block, first % BLOCK_SIZE
    else:
        positions = first + tl.arange(0, BLOCK_N)
        needed = (positions >= low) & (positions < high)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=needed, other=0).to(tl.int64)
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


@triton.jit
def merge(m, total, acc, part_m, part_total, part_acc, AXIS: tl.constexpr):
    """Merge the softmax states of two sets of positions: maximum, sum of weights, weighted values.

    Written with explicit multiply-adds, so that all kernels get the same bits.
    """
    new_m = tl.maximum(m, part_m)
    finite = tl.where(new_m == float("-inf"), 0.0, new_m)  # no visible key yet: -inf - -inf is NaN
    old, new = tl.exp2(m - finite), tl.exp2(part_m - finite)
    total = tl.fma(part_total, new, total * old)
    acc = tl.fma(part_acc, tl.expand_dims(new, AXIS), acc * tl.expand_dims(old, AXIS))
    return new_m, total, acc


@triton.jit
def normalized(acc, total, AXIS: tl.constexpr):
    """Weighted values over the sum of weights; 0 without visible keys."""
    return acc / tl.expand_dims(tl.where(total == 0.0, 1.0, total), AXIS)


@triton.jit
def splits_of(
    seq_len, window, num_splits,
    BLOCK_N: tl.constexpr, SPLIT_TILES: tl.constexpr, MIN_TILES: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The splits of a sequence's positions: first tile, tiles per split, number of splits used.

    `window` covers all queries of the sequence: the window of one, and one position for each other.
    With `SPLIT_TILES`, splits have a fixed size and absolute positions (the batch-invariant mode).
    Otherwise a sequence is divided into `num_splits` equal parts of at least `MIN_TILES` tiles;
    short sequences use fewer splits, an empty one none.
    """
    end = (seq_len + BLOCK_N - 1) // BLOCK_N
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(seq_len - window, 0) // BLOCK_N
    if SPLIT_TILES > 0:
        first = first // SPLIT_TILES * SPLIT_TILES
        size = SPLIT_TILES
    else:
        size = tl.maximum((end - first + num_splits - 1) // num_splits, MIN_TILES)
    return first, size, (end - first + size - 1) // size


# ---- the kernels ------------------------------------------------------------------------------

# Triton specialises kernels on arguments that are 1 or multiples of 16, except for those in
# `do_not_specialize`. These addresses may be views into larger tensors.
TABLES = ("query_start", "seq_lens", "block_tables")


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
    for tile in tl.range(begin, end):
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = (keys >= low) & (keys < high)
        block, place = locate(table, tile, low, high, BLOCK_SIZE, BLOCK_N)
        k = load_rows(
            k_cache, k_strides, block, place, kv_head, valid,
            NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, BULK, MASKED,
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
            NUM_KV_HEADS, BLOCK_SIZE, BLOCK_N, VALUE_DIM, BLOCK_DV, BULK, MASKED,
        )  # fmt: skip
        if SWAP:
            acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * rescale, input_precision="ieee")
        else:
            acc = tl.dot(p.to(v.dtype), v, acc * rescale, input_precision="ieee")
        m = new_m
    return m, weights, acc


@triton.jit(do_not_specialize=[*TABLES, "table_stride", "window", "few", "num_splits"])
def decode_kernel(
    q, k_cache, v_cache, out, partial, stats, query_start, seq_lens, block_tables,
    q_strides, k_strides, v_strides, out_strides, table_stride,
    scale, soft_cap, window, few, num_splits,
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
        if split >= used:
            return
    first_position = seq_len - query_len + row
    begin = first + split * size
    full, end, low, high = split_bounds(
        begin, size, first_position, count, window, BLOCK_N, HAS_WINDOW
    )
    places, inside = row_places(
        start + row, count, kv_head, q_strides, GROUP, BLOCK_M, HEAD_DIM, BLOCK_D
    )
    rows = tl.load(q + places, mask=inside, other=0.0)
    rows = tl.trans(rows) if SWAP else rows
    position = first_position + tl.arange(0, BLOCK_M) // GROUP
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_DV, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_DV], tl.float32)
    table = block_tables + sequence.to(tl.int64) * table_stride
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
    total = tl.sum(weights, 0 if SWAP else 1)
    store_tile(
        SPLIT, partial, stats, kv_head, split, sequence * few + row, num_splits, out, out_strides,
        start + row, count, m, total, acc,
        GROUP, NUM_KV_HEADS, BLOCK_M, VALUE_DIM, BLOCK_DV, 0 if SWAP else 1,
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


@triton.jit
def store_tile(
    apart, partial, stats, kv_head, split, place, num_splits, out, out_strides, row, count,
    m, total, acc,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store a tile's results from `row` on; if `apart`, its partial results in the workspace."""
    if apart:
        store_part(
            partial, stats, place, count, kv_head, split, num_splits, m, total, acc,
            GROUP, NUM_KV_HEADS, BLOCK_M, VALUE_DIM, BLOCK_DV, AXIS,
        )  # fmt: skip
    else:
        store_rows(
            out, out_strides, row, count, kv_head, total, acc,
            GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV, AXIS,
        )  # fmt: skip


@triton.jit
def store_rows(
    out, out_strides, row, count, kv_head, total, acc,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """Store the results of `count` rows of G heads, 0 for rows without visible keys. `AXIS` is the
    axis of the values in `acc`: 1, or 0 if transposed."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    head = (kv_head * GROUP + rows % GROUP).to(tl.int64)
    starts = (row.to(tl.int64) + rows // GROUP) * out_strides[0] + head * out_strides[1]
    offsets = tl.expand_dims(starts, AXIS) + tl.expand_dims(dims, 1 - AXIS)
    written = rows // GROUP < count
    inside = tl.expand_dims(written, AXIS) & tl.expand_dims(dims < VALUE_DIM, 1 - AXIS)
    result = normalized(acc, total, AXIS)
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def store_part(
    partial, stats, row, count, kv_head, split, num_splits, m, total, acc,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store a split of `count` rows of G heads for `combine_kernel`, `few` rows per sequence."""
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_DV)
    token = row.to(tl.int64) + rows // GROUP
    head = token * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    part = head * num_splits + split  # index into [B, few, H, splits]
    written = rows // GROUP < count
    tl.store(stats + part * 2, m, mask=written)
    tl.store(stats + part * 2 + 1, total, mask=written)
    offsets = tl.expand_dims(part * VALUE_DIM, AXIS) + tl.expand_dims(dims, 1 - AXIS)
    inside = tl.expand_dims(written, AXIS) & tl.expand_dims(dims < VALUE_DIM, 1 - AXIS)
    tl.store(partial + offsets, acc, mask=inside)


@triton.jit(do_not_specialize=[*TABLES, "window", "few", "num_splits"])
def combine_kernel(
    partial, stats, out, query_start, seq_lens, out_strides, window, few, num_splits,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_TILES: tl.constexpr, MIN_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Program (b and query, head): merge the splits of one head of a row, BLOCK_S at a time.

    Unused splits are neither written nor read. With BLOCK_S = 1, splits are merged one after
    another, as in the batch-invariant kernel.
    """
    place, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, query = place // few, place % few
    first_row = tl.load(query_start + sequence).to(tl.int64)
    query_len = (tl.load(query_start + sequence + 1) - first_row).to(tl.int32)
    if (query >= query_len) | (query_len > few):
        return
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    _, _, used = splits_of(
        seq_len, window + query_len - 1, num_splits, BLOCK_N, SPLIT_TILES, MIN_TILES, HAS_WINDOW
    )
    dims = tl.arange(0, BLOCK_DV)
    parts = (place.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for start in tl.range(0, used, BLOCK_S):
        split = start + tl.arange(0, BLOCK_S)
        part_m = tl.load(stats + (parts + split) * 2, mask=split < used, other=float("-inf"))
        part_total = tl.load(stats + (parts + split) * 2 + 1, mask=split < used, other=0.0)
        offsets = (parts + split)[:, None] * VALUE_DIM + dims[None, :]
        inside = (split < used)[:, None] & (dims < VALUE_DIM)[None, :]
        part_acc = tl.load(partial + offsets, mask=inside, other=0.0)  # [BLOCK_S, BLOCK_DV]
        if BLOCK_S > 1:  # merge the BLOCK_S splits first
            most = tl.max(part_m, 0)
            weight = tl.exp2(part_m - tl.where(most == float("-inf"), 0.0, most))
            part_m = tl.max(part_m, 0, keep_dims=True)
            part_total = tl.sum(part_total * weight, 0, keep_dims=True)
            part_acc = tl.sum(part_acc * weight[:, None], 0, keep_dims=True)
        m, total, acc = merge(m, total, acc, part_m, part_total, part_acc, 1)
    pointers = out + (first_row + query) * out_strides[0] + head * out_strides[1] + dims[None, :]
    result = normalized(acc, total, 1).to(out.dtype.element_ty)
    tl.store(pointers, result, mask=(dims < VALUE_DIM)[None, :])
