"""Operations whose result for a row has the same bits whatever else is computed beside it.

A matrix product gives other bits for other shapes, because its sums are cut differently. So here a
shape depends on nothing but a token's own position: not on how many tokens of its sequence come
with it, and not on other sequences.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_TILE = 8


def tiled_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention` with one arithmetic for every query length, chunk and block size.

    The queries of a sequence are cut at multiples of `QUERY_TILE`: the one at position p is always
    row p % QUERY_TILE of tile p // QUERY_TILE, beside its neighbours or beside zeros. A tile looks
    at the keys from position 0 (with a window: from the tile in which its first row's window
    begins) to its own end, so that all shapes follow from p. What lies behind the sequence's end
    is zero, because 0 * NaN is NaN. Rows of `q` behind the last sequence are padding, and get a
    copy of the last result.
    """
    value_dim = v_cache.shape[-1]
    starts, ends = query_start.tolist(), seq_lens.tolist()
    out = q.new_empty(len(q), q.shape[1], value_dim)
    longest = round_up(max(ends))
    mask = tile_mask(longest, window, q).repeat(q.shape[1] // k_cache.shape[1], 1)  # [G * QT, S]
    value_in_key = v_cache.data_ptr() == k_cache.data_ptr()  # MLA's is the key's first part
    for row, end in enumerate(ends):
        begin = end - (starts[row + 1] - starts[row])
        first = first_key(begin, window)
        k = gather_positions(k_cache, block_tables[row], first, end)
        v = k if value_in_key else gather_positions(v_cache, block_tables[row], first, end)
        for tile in range(begin // QUERY_TILE * QUERY_TILE, end, QUERY_TILE):
            low, high = max(begin, tile), min(end, tile + QUERY_TILE)
            rows = slice(starts[row] + low - begin, starts[row] + high - begin)
            keys = slice(first_key(tile, window) - first, tile + QUERY_TILE - first)
            tile_k, tile_v = k[:, keys], v[:, keys]
            tile_bias = mask[:, longest - tile_k.shape[1] :]
            result = attend_tile(q[rows], low - tile, tile_k, tile_v, tile_bias, scale)
            out[rows] = result[..., :value_dim]
    out[starts[-1] :] = out[starts[-1] - 1]
    return out


def attend_tile(
    q: Tensor, first_row: int, k: Tensor, v: Tensor, mask: Tensor, scale: float
) -> Tensor:
    """The rows of a query tile from `first_row` on, of which there may be few; the others are 0.

    `q` [rows, H, D], `k` [Hkv, S, D], `v` [Hkv, S, Dv], `mask` [G * QT, S] -> [rows, H, Dv]. The G
    query heads of a KV head stand below each other, as in `causal_attention`.
    """
    group = q.shape[1] // len(k)
    rows = slice(first_row, first_row + len(q))
    tile = q.new_zeros(len(k), group, QUERY_TILE, q.shape[2])
    tile[:, :, rows] = q.unflatten(1, (-1, group)).permute(1, 2, 0, 3)  # [Hkv, G, rows, D]
    out = F.scaled_dot_product_attention(
        tile.flatten(1, 2)[None], k[None], v[None], attn_mask=mask, scale=scale
    )  # [1, Hkv, G * QT, Dv]
    wanted = out[0].unflatten(1, (group, QUERY_TILE))[:, :, rows]
    return wanted.permute(2, 0, 1, 3).flatten(1, 2)


def round_up(position: int) -> int:
    """The end of the query tile that a sequence's last position is in."""
    return -(-position // QUERY_TILE) * QUERY_TILE


def first_key(position: int, window: int | None) -> int:
    """Where the keys begin for the query tile that `position` is in."""
    if window is None:
        return 0
    tile = position // QUERY_TILE * QUERY_TILE
    return max(0, tile - window + 1) // QUERY_TILE * QUERY_TILE


def tile_mask(num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """What a query tile adds to its scores, 0 or -inf: [QUERY_TILE, num_keys].

    Its own keys are the last ones. Only distances matter, so the last columns of this serve a tile
    with fewer keys.
    """
    query = torch.arange(num_keys - QUERY_TILE, num_keys, device=like.device).unsqueeze(1)
    key = torch.arange(num_keys, device=like.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return like.new_zeros(QUERY_TILE, num_keys).masked_fill_(hidden, float("-inf"))


def gather_positions(cache: Tensor, block_table: Tensor, first: int, end: int) -> Tensor:
    """Positions of one sequence from `first` to the end of its last query tile, 0 from `end` on.

    [blocks, Hkv, block_size, D] -> a new, contiguous [Hkv, S, D], of which only S and the values
    can matter to a product: not the block size, nor how many blocks there are.
    """
    size, length = cache.shape[2], round_up(end) - first
    low, offset = first // size, first % size
    blocks = cache.index_select(0, block_table[low : -(-end // size)])  # [n, Hkv, block_size, D]
    positions = blocks.transpose(0, 1).flatten(1, 2)[:, offset : offset + length]
    if offset or positions.shape[1] < length or not positions.is_contiguous():
        gathered = cache.new_empty(cache.shape[1], length, cache.shape[3])
        gathered[:, : positions.shape[1]] = positions
        positions = gathered
    positions[:, end - first :] = 0
    return positions


def invariant_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul` in operations that round a number the same wherever in a tensor it is.

    `F.silu` has another exponential for what is left behind the last full vector of a thread, and
    where a thread's part ends depends on how many rows and threads there are. `exp` alone has one
    for all; a sum, a quotient and a product of two numbers have only one right rounding.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate32 = gate.float()
    return (gate32 / (-gate32).exp_().add_(1)).to(gate.dtype) * up


def tiled_moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """`moe_experts` in which every chosen expert computes all rows, so that shapes are fixed.

    What an expert computes for a row that did not choose it is dropped; the experts of a row are
    summed in ascending order.
    """
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        chosen = ids == expert  # [N, k], at most once per row
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True)  # [N, 1]
        hidden = invariant_silu_mul(F.linear(x, gate_up[expert]))
        contribution = (F.linear(hidden, down[expert]) * weight).to(x.dtype)
        out = torch.where(chosen.any(-1, keepdim=True), out + contribution, out)
    return out
