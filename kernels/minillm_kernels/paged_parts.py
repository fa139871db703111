"""Splits of a sequence's positions: their results, and the merge of these.

A program that attends to a part of the positions has the state of an online softmax: maximum m, sum
of weights l, and weighted sum of values. They are stored in a float32 workspace, and merged in
ascending order by the program that arrives last, or by `combine_kernel`.
"""

from minillm_kernels.launch import tl, triton

# Triton specialises kernels on arguments that are 1 or multiples of 16, except for those in
# `do_not_specialize`. These addresses may be views into larger tensors.
TABLES = ("query_start", "seq_lens", "block_tables")
TAILS = ("tail_starts", "tail_order", "tail_stride")


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
def merge_rows(m, total, acc, part_m, part_total, part_acc):
    """`merge` of rows [M], values [M, Dv]."""
    return merge(m, total, acc, part_m, part_total, part_acc, 1)


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
def first_parts(
    row, count, kv_head, num_splits, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Index in [B, few, H, splits] of the first split of `count` rows of G heads; which exist."""
    rows = tl.arange(0, BLOCK_M)
    token = row.to(tl.int64) + rows // GROUP
    head = token * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + rows % GROUP
    return head * num_splits, rows // GROUP < count


@triton.jit
def store_part(
    partial, stats, row, count, kv_head, split, num_splits, m, total, acc,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, AXIS: tl.constexpr,
):  # fmt: skip
    """Store a split of `count` rows of G heads, `few` rows per sequence."""
    first, written = first_parts(row, count, kv_head, num_splits, GROUP, NUM_KV_HEADS, BLOCK_M)
    part, dims = first + split, tl.arange(0, BLOCK_DV)
    tl.store(stats + part * 2, m, mask=written)
    tl.store(stats + part * 2 + 1, total, mask=written)
    offsets = tl.expand_dims(part * VALUE_DIM, AXIS) + tl.expand_dims(dims, 1 - AXIS)
    inside = tl.expand_dims(written, AXIS) & tl.expand_dims(dims < VALUE_DIM, 1 - AXIS)
    tl.store(partial + offsets, acc, mask=inside)


@triton.jit
def arrives_last(arrivals, programs, NUM_KV_HEADS: tl.constexpr):
    """Whether this is the last of `programs` programs of its tile and KV head, all of which have
    stored their parts; it sets their counter back to 0."""
    tl.debug_barrier()  # all threads have stored before the arrival is signalled
    place = arrivals + tl.program_id(0) * NUM_KV_HEADS + tl.program_id(1)
    last = tl.atomic_add(place, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(place, 0)
    return last


@triton.jit
def merge_parts(
    partial, stats, row, count, kv_head, num_splits, begin, used,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Merge `used` parts from `begin` on of `count` rows of G heads, in ascending order: the sum of
    weights and the weighted values. `MERGE` merges two."""
    first, written = first_parts(row, count, kv_head, num_splits, GROUP, NUM_KV_HEADS, BLOCK_M)
    dims = tl.arange(0, BLOCK_DV)[None, :]
    inside = written[:, None] & (dims < VALUE_DIM)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    for split in tl.range(0, used, num_stages=2):  # not from the cache of this multiprocessor
        part = first + begin + split
        part_m = tl.load(stats + part * 2, written, float("-inf"), cache_modifier=".cg")
        part_total = tl.load(stats + part * 2 + 1, written, 0.0, cache_modifier=".cg")
        place = partial + part[:, None] * VALUE_DIM + dims
        part_acc = tl.load(place, inside, 0.0, cache_modifier=".cg")
        m, total, acc = MERGE(m, total, acc, part_m, part_total, part_acc)
    return total, acc


@triton.jit
def finish(
    partial, stats, arrivals, place, num_splits, begin, split, used, out, out_strides, row, count,
    kv_head, m, total, acc,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, AXIS: tl.constexpr, MERGE: tl.constexpr,
    STORE: tl.constexpr,
):  # fmt: skip
    """Store the results of `count` rows of G heads. If `used` splits from `begin` on share them,
    store those of `split`, and merge all of them if this program is the last."""
    if used > 1:
        store_part(
            partial, stats, place, count, kv_head, split, num_splits, m, total, acc,
            GROUP, NUM_KV_HEADS, BLOCK_M, VALUE_DIM, BLOCK_DV, AXIS,
        )  # fmt: skip
        if arrives_last(arrivals, used, NUM_KV_HEADS):
            sums, values = merge_parts(
                partial, stats, place, count, kv_head, num_splits, begin, used,
                GROUP, NUM_KV_HEADS, BLOCK_M, VALUE_DIM, BLOCK_DV, MERGE,
            )  # fmt: skip
            STORE(
                out, out_strides, row, count, kv_head, sums, values,
                GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV, 1,
            )  # fmt: skip
    else:
        STORE(
            out, out_strides, row, count, kv_head, total, acc,
            GROUP, BLOCK_M, VALUE_DIM, BLOCK_DV, AXIS,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*TABLES, "window", "few", "num_splits"])
def combine_kernel(
    partial, stats, out, query_start, seq_lens, out_strides, window, few, num_splits,
    VALUE_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (b and query, head): merge the splits of one head of a row, one after another, as in
    the batch-invariant kernel. Unused splits are neither written nor read."""
    place, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    sequence, query = place // few, place % few
    first_row = tl.load(query_start + sequence).to(tl.int64)
    query_len = (tl.load(query_start + sequence + 1) - first_row).to(tl.int32)
    if (query >= query_len) | (query_len > few):
        return
    seq_len = tl.load(seq_lens + sequence).to(tl.int32)
    _, _, used = splits_of(
        seq_len, window + query_len - 1, num_splits, BLOCK_N, SPLIT_TILES, 1, HAS_WINDOW
    )
    dims = tl.arange(0, BLOCK_DV)[None, :]
    parts = (place.to(tl.int64) * tl.num_programs(1) + head) * num_splits
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for split in tl.range(0, used):
        part = parts + split + tl.zeros([1], tl.int32)
        values = partial + part[:, None] * VALUE_DIM + dims
        part_acc = tl.load(values, mask=dims < VALUE_DIM, other=0.0)
        part_m, part_total = tl.load(stats + part * 2), tl.load(stats + part * 2 + 1)
        m, total, acc = merge(m, total, acc, part_m, part_total, part_acc, 1)
    pointers = out + (first_row + query) * out_strides[0] + head * out_strides[1] + dims
    result = normalized(acc, total, 1).to(out.dtype.element_ty)
    tl.store(pointers, result, mask=dims < VALUE_DIM)
