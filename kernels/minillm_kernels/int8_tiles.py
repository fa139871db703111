"""The kernel of `int8_pages`: the arithmetic of `int8_cache`, a tile, and the join of parts."""

from minillm_kernels.launch import tl, triton
from minillm_kernels.paged_decode import in_tail, row_places, tail_of
from minillm_kernels.paged_parts import TAILS, finish, store_rows
from minillm_kernels.paged_prefill import find_tile

# Neither the alignment of these addresses nor the size of these numbers is compiled in.
TABLES = ("query_start", "seq_lens", "block_tables")
NUMBERS = ("num_sequences", "window", "few", "num_parts")

# ---- arithmetic -------------------------------------------------------------------------------


@triton.jit
def rounded(x):
    """The nearest integer, ties to even, for |x| < 2^22."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def powers(x):
    """`int8_cache.exp2`: 2^x for x <= 0."""
    least = tl.maximum(x, -100.0)
    n = rounded(least)
    r = least - n
    p = tl.fma(r, 1.326472731307149e-3, 9.671512991189957e-3)
    p = tl.fma(p, r, 5.550733581185341e-2)
    p = tl.fma(p, r, 2.4022242426872253e-1)
    p = tl.fma(p, r, 6.931470036506653e-1)
    p = tl.fma(p, r, 1.0)
    bits = p.to(tl.int32, bitcast=True) + (n.to(tl.int32) << 23)
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def shrink(old, new):
    """The factor of sums whose largest score was `old`; 0 if they are empty."""
    return tl.where(old == float("-inf"), 0.0, powers(old - new))


@triton.jit
def levels_per(most):
    """127 / most; 0 if that is tiny or not finite."""
    divides = (most > 1e-30) & (most < float("inf"))
    return tl.where(divides, tl.div_rn(127.0, tl.where(divides, most, 1.0)), 0.0)


@triton.jit
def largest_of(x):
    """The largest |x| of each row; infinity if a number is NaN, which `tl.max` would ignore."""
    return tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)


@triton.jit
def join(best, total, values, part_best, part_total, part_values):
    """`Sums.join` of rows [M], values [M, D]."""
    new = tl.maximum(best, part_best)
    old, more = shrink(best, new), shrink(part_best, new)
    total = tl.fma(part_total, more, total * old)
    return new, total, tl.fma(part_values, more[:, None], values * old[:, None])


@triton.jit
def part_of(position):
    """The part of a position."""
    return tl.where(position < 1024, position // 128, 8 + (position - 1024) // 512)


@triton.jit
def parts_of(low, high):
    """The first part of positions [low, high), and one after the last."""
    return part_of(low), tl.where(high > low, part_of(tl.maximum(high - 1, 0)) + 1, 0)


@triton.jit
def part_begin(part):
    """The first position of a part."""
    return tl.where(part < 8, part * 128, 1024 + (part - 8) * 512)


@triton.jit
def quotients(values, total):
    """Weighted values over the sums of weights; 0 without visible positions."""
    some = (total != 0.0)[:, None]
    return tl.where(some, tl.div_rn(values, tl.where(some, total[:, None], 1.0)), 0.0)


# ---- attention --------------------------------------------------------------------------------


@triton.jit
def attend_tiles(
    q, factor, position, best, total, values, k_cache, v_cache, k_scale, v_scale, table, begin, end,
    low, high, window, kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Add to the sums of a part, of codes `q` [M, D] over positions [begin, end) in tiles of 64.
    Positions outside of [low, high) are seen by no row, and not read. With a tail (`tail_of`),
    bytes of positions are read one by one instead of those of four positions together."""
    numbers, tail_start, tail = table
    byte, dims = tl.arange(0, 4 * BLOCK_D)[None, :], tl.arange(0, BLOCK_D)[None, :]
    for at in tl.range(begin, end, 64):
        if tail is None:
            group = at + 4 * tl.arange(0, 16)  # of four positions, in one block
            read = (group < high) & (group + 4 > low)
            each = tl.arange(0, 4)[None, :]
            known = (group[:, None] + each >= low) & (group[:, None] + each < high)
        else:
            group, each = at + tl.arange(0, 64), 0
            read = (group >= low) & (group < high)
            group, known = in_tail(group, read, tail_start, tail), read[:, None]
        block = tl.load(numbers + group // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
        place = ((block * NUM_KV_HEADS + kv_head) * BLOCK_SIZE + group % BLOCK_SIZE)[:, None]
        key_scales = tl.load(k_scale + place + each, mask=known, other=0.0).to(tl.float32)
        value_scales = tl.load(v_scale + place + each, mask=known, other=0.0).to(tl.float32)
        if tail is None:
            inside, bytes_of_keys, bytes_of_values = read[:, None] & (byte < 4 * DIM), byte, byte
            place = place * DIM
        else:
            inside, side = known & (dims < DIM), place % 4
            bytes_of_keys, bytes_of_values = 4 * side + dims // 4 * 16 + dims % 4, side + dims * 4
            place = (place - side) * DIM
        keys = tl.load(k_cache + place + bytes_of_keys, mask=inside, other=128)
        keys = (keys ^ 128).to(tl.int8, bitcast=True)  # code + 128 -> code
        if tail is None:
            keys = tl.permute(tl.reshape(keys, (16, BLOCK_D // 4, 4, 4)), (0, 2, 1, 3))
        scores = tl.dot(q, tl.trans(tl.reshape(keys, (64, BLOCK_D))), out_dtype=tl.int32)
        scores = scores.to(tl.float32) * factor[:, None] * tl.reshape(key_scales, (1, 64))
        seen = at + tl.arange(0, 64)[None, :]
        visible = (seen <= position[:, None]) & (seen > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        weights = powers(scores - tl.where(new == float("-inf"), 0.0, new)[:, None])
        weights = tl.where(visible, weights, 0.0)
        scaled = tl.where(visible, weights * tl.reshape(value_scales, (1, 64)), 0.0)
        top = tl.max(scaled, 1)
        inverse = levels_per(top)[:, None]
        codes = tl.fma(scaled, inverse, 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
        codes = tl.where(inverse > 0.0, codes, 0).to(tl.int8)  # infinity times 0 is NaN
        rows = tl.load(v_cache + place + bytes_of_values, mask=inside, other=0)
        if tail is None:
            rows = tl.permute(tl.reshape(rows, (16, BLOCK_D, 4)), (0, 2, 1))
        products = tl.dot(codes, tl.reshape(rows, (64, BLOCK_D)), out_dtype=tl.int32)
        old = shrink(best, new)
        unit = tl.div_rn(top, 127.0)[:, None]
        values = tl.fma(unit, products.to(tl.float32), values * old[:, None])
        for i in tl.static_range(6):  # the sum of halves, of their halves, and so on
            weights = tl.sum(tl.reshape(weights, (BLOCK_M, 2, 32 >> i)), 1)
        total = tl.fma(total, old, tl.reshape(weights, (BLOCK_M,)))
        best = new
    return best, total, values


@triton.jit
def attend_part(
    q, factor, position, k_cache, v_cache, k_scale, v_scale, table, begin, end, low, high, window,
    kv_head, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Sums of a part, of codes `q` [M, D] over positions [begin, end)."""
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, values = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    numbers, tail_start, tail = table
    ordered = end  # tiles before it are in order
    if tail is not None:
        ordered = tl.minimum(tl.maximum(tail_start // 64 * 64, begin), end)
    best, total, values = attend_tiles(
        q, factor, position, best, total, values, k_cache, v_cache, k_scale, v_scale,
        (numbers, 0, None), begin, ordered, low, high, window, kv_head,
        NUM_KV_HEADS, BLOCK_SIZE, BLOCK_M, DIM, BLOCK_D,
    )  # fmt: skip
    if tail is not None:
        best, total, values = attend_tiles(
            q, factor, position, best, total, values, k_cache, v_cache, k_scale, v_scale,
            table, ordered, end, low, high, window, kv_head,
            NUM_KV_HEADS, BLOCK_SIZE, BLOCK_M, DIM, BLOCK_D,
        )  # fmt: skip
    return best, total, values


@triton.jit(do_not_specialize=[*TABLES, *TAILS, "table_stride", *NUMBERS])
def attention_kernel(
    q, k_cache, v_cache, k_scale, v_scale, out, partial, stats, arrivals, query_start, seq_lens,
    block_tables, tail_starts, tail_order, tail_stride, q_strides, out_strides, table_stride, scale,
    window, num_sequences, few, num_parts,
    GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    """Program (tile, kv_head): BLOCK_Q queries of a sequence, G heads each, over all parts; those
    with up to `few` queries are left to a launch of (tile, kv_head, part) programs (`APART`), of
    which the last to arrive joins all parts."""
    index, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence, start, number = find_tile(query_start, index, num_sequences, BLOCK_Q)
    query_len = tl.load(query_start + sequence + 1).to(tl.int32) - start
    row = number * BLOCK_Q
    if (row >= query_len) | ((query_len > few) if APART else (query_len <= few)):
        return
    count = tl.minimum(query_len - row, BLOCK_Q)
    first = tl.load(seq_lens + sequence).to(tl.int32) - query_len + row
    low, high = tl.maximum(first - window + 1, 0), tl.maximum(first + count, 0)
    first_part, end_part = parts_of(low, high)
    begin_part, num_used = first_part, tl.maximum(end_part - first_part, 1)
    if APART:
        first_part += tl.program_id(2)
        if tl.program_id(2) >= num_used:  # without visible positions, the first stores zeros
            return
        end_part = first_part + 1
    places, inside = row_places(
        start + row, count, kv_head, q_strides, GROUP, BLOCK_M, DIM, BLOCK_D
    )
    rows = tl.load(q + places, mask=inside, other=0.0).to(tl.float32)
    most = largest_of(rows)
    inverse = levels_per(most)[:, None]
    codes = tl.where(inverse > 0.0, rounded(rows * inverse), 0.0).to(tl.int8)
    factor = tl.div_rn(most, 127.0) * scale  # infinity if a number is not finite
    position = first + tl.arange(0, BLOCK_M) // GROUP
    tail = (0, None)
    if tail_order is not None:
        tail = tail_of(tail_starts, tail_order, tail_stride, sequence)
    table = (block_tables + sequence.to(tl.int64) * table_stride, tail[0], tail[1])
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, values = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.range(first_part, end_part):
        part_best, part_total, part_values = attend_part(
            codes, factor, position, k_cache, v_cache, k_scale, v_scale, table,
            tl.maximum(part_begin(part), low // 64 * 64), tl.minimum(part_begin(part + 1), high),
            low, high, window, kv_head, NUM_KV_HEADS, BLOCK_SIZE, BLOCK_M, DIM, BLOCK_D,
        )  # fmt: skip
        best, total, values = join(best, total, values, part_best, part_total, part_values)
    finish(
        partial, stats, arrivals, sequence * few + row, num_parts, begin_part, first_part,
        num_used if APART else 1, out, out_strides, start + row, count, kv_head, best, total,
        values, GROUP, NUM_KV_HEADS, BLOCK_M, DIM, BLOCK_D, 1, join, store_quotients,
    )  # fmt: skip


@triton.jit
def store_quotients(
    out, out_strides, row, count, kv_head, total, values,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    AXIS: tl.constexpr,
):  # fmt: skip
    """`store_rows` with quotients that are rounded once."""
    one = tl.full([BLOCK_M], 1.0, tl.float32)
    store_rows(
        out, out_strides, row, count, kv_head, one, quotients(values, total),
        GROUP, BLOCK_M, DIM, BLOCK_D, AXIS,
    )  # fmt: skip
