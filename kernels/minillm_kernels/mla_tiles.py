"""Device functions of `minillm_kernels.mla` for a tile of queries: load, attend, merge, store.

A *query* is one head of one token; a tile has BLOCK_M queries. Scores are [queries, keys] and sums
[queries, R]; with SWAP both are transposed.
"""

from minillm_kernels.launch import tl, triton


@triton.jit
def find_queries(
    first_token, head_tile, query_len, seq_len, num_heads, window, BLOCK_Q: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A tile of BLOCK_Q tokens x BLOCK_H heads out of a sequence's last `query_len` tokens.

    Returns for each query [BLOCK_M] the token (counted from the sequence's first query), the head,
    whether both exist, and the position (-1: no visible keys); and the range [begin, end) of keys
    that are visible to any query of the tile.
    """
    lanes = tl.arange(0, BLOCK_Q * BLOCK_H)
    tokens = first_token + lanes // BLOCK_H
    heads = head_tile * BLOCK_H + lanes % BLOCK_H
    inside = (tokens < query_len) & (heads < num_heads)
    places = tl.where(tokens < query_len, seq_len - query_len + tokens, -1)
    first_place = seq_len - query_len + first_token
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_place - window + 1, 0) // BLOCK_N * BLOCK_N
    return tokens, heads, inside, places, begin, tl.minimum(first_place + BLOCK_Q, seq_len)


@triton.jit
def load_query(
    q_ptr, stride_token, stride_head, tokens, heads, inside,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of queries: latent parts [BLOCK_M, BLOCK_R] and rotated parts [BLOCK_M, BLOCK_D]."""
    rows = q_ptr + tokens.to(tl.int64) * stride_token + heads * stride_head
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    latent = tl.load(rows[:, None] + r[None, :], mask=inside[:, None] & (r < R)[None, :], other=0.0)
    rope = tl.load(
        rows[:, None] + R + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
    )
    return latent, rope


@triton.jit
def load_keys(
    cache_ptr, table_ptr, positions, valid, PAGE: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of keys through the block table: [BLOCK_N, BLOCK_R] and [BLOCK_N, BLOCK_D].

    Keys that are not `valid` are 0, because a weight of 0 times NaN is NaN.
    """
    blocks = tl.load(table_ptr + positions // PAGE, mask=valid, other=0).to(tl.int64)
    rows = cache_ptr + (blocks * PAGE + positions % PAGE) * (R + D)
    r, d = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    latent = tl.load(rows[:, None] + r[None, :], mask=valid[:, None] & (r < R)[None, :], other=0.0)
    rope = tl.load(
        rows[:, None] + R + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0
    )
    return latent, rope


@triton.jit
def add_tile(
    state, q_latent, q_rope, latent, rope, positions, places, window, scale,
    WINDOW: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax (Milakov and Gimelshein, 2018): one tile of keys.

    `positions` [BLOCK_N] are those of the keys, `places` [BLOCK_M] those of the queries (-1: no
    visible keys). The state is unnormalised: maximum, sum of weights, weighted sum of values.
    """
    highest, total, acc = state
    KEYS: tl.constexpr = 0 if SWAP else 1  # the axis of keys in the scores
    if SWAP:
        scores = tl.dot(latent, tl.trans(q_latent), input_precision="ieee")
        scores = tl.dot(rope, tl.trans(q_rope), scores, input_precision="ieee")
    else:
        scores = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
    key, query = tl.expand_dims(positions, 1 - KEYS), tl.expand_dims(places, KEYS)
    visible = key <= query
    if WINDOW:
        visible = visible & (key > query - window)
    scores = tl.where(visible, scores * scale, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, KEYS))
    shift = tl.where(higher == float("-inf"), 0.0, higher)  # no visible key yet
    decay = tl.exp2(highest - shift)
    weights = tl.exp2(scores - tl.expand_dims(shift, KEYS))
    total = tl.fma(total, decay, tl.sum(weights, KEYS))
    acc = acc * tl.expand_dims(decay, KEYS)
    weights = weights.to(latent.dtype)
    if SWAP:  # the value is the key's latent part, already in shared memory
        acc = tl.dot(tl.trans(latent), weights, acc, input_precision="ieee")
    else:
        acc = tl.dot(weights, latent, acc, input_precision="ieee")
    return higher, total, acc


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, SWAP: tl.constexpr):
    """The initial state: twice [BLOCK_M]; [BLOCK_R, BLOCK_M] if SWAP, else [BLOCK_M, BLOCK_R]."""
    acc = tl.zeros([BLOCK_R, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_R], tl.float32)
    return tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32), acc


@triton.jit
def attend(
    q_latent, q_rope, places, begin, end, cache_ptr, latent_tiles, rope_tiles, table_ptr,
    window, scale, PAGE: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, WINDOW: tl.constexpr, SWAP: tl.constexpr, DESCRIPTORS: tl.constexpr,
):  # fmt: skip
    """Attend from a tile of queries to the keys [begin, end); `begin` is a multiple of BLOCK_N.

    With descriptors, full tiles are loaded by bulk copies, each from one page. The last partial
    tile is loaded row by row, because a bulk copy cannot mask rows, which may be NaN.
    """
    state = empty_state(BLOCK_M, BLOCK_R, SWAP)
    offsets = tl.arange(0, BLOCK_N)
    rest = begin
    if DESCRIPTORS:
        rest = tl.maximum(begin, end // BLOCK_N * BLOCK_N)
        block = tl.load(table_ptr + begin // PAGE, mask=begin < rest, other=0)
        for start in tl.range(begin, rest, BLOCK_N, num_stages=STAGES):
            row = block.to(tl.int32) * PAGE + start % PAGE
            following = start + BLOCK_N  # prefetch the address of the next tile
            block = tl.load(table_ptr + following // PAGE, mask=following < rest, other=0)
            latent, rope = latent_tiles.load([row, 0]), rope_tiles.load([row, R])
            state = add_tile(
                state, q_latent, q_rope, latent, rope, start + offsets, places, window, scale,
                WINDOW, SWAP,
            )  # fmt: skip
    for start in tl.range(
        rest, end, BLOCK_N, num_stages=1 if DESCRIPTORS else STAGES, disable_licm=True
    ):
        positions = start + offsets
        latent, rope = load_keys(
            cache_ptr, table_ptr, positions, positions < end, PAGE, R, D, BLOCK_R, BLOCK_D
        )
        state = add_tile(
            state, q_latent, q_rope, latent, rope, positions, places, window, scale, WINDOW, SWAP
        )
    return state


@triton.jit
def store_rows(
    base_ptr, rows, values, inside, R: tl.constexpr, BLOCK_R: tl.constexpr, SWAP: tl.constexpr
):
    """Store values of either orientation as rows of R numbers."""
    KEYS: tl.constexpr = 0 if SWAP else 1
    r = tl.expand_dims(tl.arange(0, BLOCK_R), 1 - KEYS)
    mask = tl.expand_dims(inside, KEYS) & (r < R)
    pointers = base_ptr + tl.expand_dims(rows, KEYS) + r
    tl.store(pointers, values.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit
def plan_splits(seq_len, query_len, window, capacity, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr,
                LEAST: tl.constexpr, WINDOW: tl.constexpr):  # fmt: skip
    """Divide the keys visible to a sequence's last `query_len` tokens into splits.

    Returns origin, size, first split, last split + 1. Split i covers `size` positions from
    origin + i * size on. With SPLIT, the size is SPLIT and the origin is position 0; otherwise the
    visible keys are divided into at most `capacity` equal splits.
    """
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(seq_len - query_len + 1 - window, 0) // BLOCK_N * BLOCK_N
    if SPLIT > 0:
        origin = 0
        size = SPLIT
    else:
        origin = first_key
        tiles = tl.cdiv(seq_len - first_key, BLOCK_N)
        size = tl.maximum(tl.cdiv(tiles, capacity), LEAST) * BLOCK_N
    return origin, size, (first_key - origin) // size, tl.cdiv(seq_len - origin, size)
