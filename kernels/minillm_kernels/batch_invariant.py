"""Batch-invariant operations in plain torch: a row's result has the same bits in any batch.

A matrix product rounds differently for different shapes, because its sums are split differently.
Here all shapes depend only on a token's own position: not on the number of tokens of its sequence
in the step, and not on other sequences.
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
    """`paged_attention` with the same arithmetic for every query length, chunk and block size.

    The queries of a sequence are tiled at multiples of `QUERY_TILE`: position p is always row
    p % QUERY_TILE of tile p // QUERY_TILE; missing rows of a tile are zeros. A tile attends to the
    keys from position 0 (with a window: from the tile in which its first row's window begins) to
    its own end, so all shapes follow from p. Keys and values after the sequence's end are zeroed,
    because 0 * NaN is NaN. Rows of `q` after the last sequence are padding, and get a copy of the
    last result.
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
    """Attention of the rows of a query tile from `first_row` on; missing rows are zeros.

    `q` [rows, H, D], `k` [Hkv, S, D], `v` [Hkv, S, Dv], `mask` [G * QT, S] -> [rows, H, Dv]. The G
    query heads of a KV head are stacked as rows, as in `causal_attention`.
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
    """The end of the query tile that contains a sequence's last position."""
    return -(-position // QUERY_TILE) * QUERY_TILE


def first_key(position: int, window: int | None) -> int:
    """The first key position of the query tile that contains `position`."""
    if window is None:
        return 0
    tile = position // QUERY_TILE * QUERY_TILE
    return max(0, tile - window + 1) // QUERY_TILE * QUERY_TILE


def tile_mask(num_keys: int, window: int | None, like: Tensor) -> Tensor:
    """The additive mask of a query tile, 0 or -inf: [QUERY_TILE, num_keys].

    The tile's own keys are the last columns. Only distances matter, so a tile with fewer keys uses
    the last columns of this mask.
    """
    query = torch.arange(num_keys - QUERY_TILE, num_keys, device=like.device).unsqueeze(1)
    key = torch.arange(num_keys, device=like.device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    return like.new_zeros(QUERY_TILE, num_keys).masked_fill_(hidden, float("-inf"))


def gather_positions(cache: Tensor, block_table: Tensor, first: int, end: int) -> Tensor:
    """Positions of one sequence from `first` to the end of its last query tile, 0 from `end` on.

    [blocks, Hkv, block_size, D] -> a new, contiguous [Hkv, S, D], whose layout does not depend on
    the block size or the number of blocks.
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
    """`silu_mul` in operations whose rounding does not depend on a number's place in the tensor.

    `F.silu` uses a different exponential for the remainder after a thread's last full vector, and
    that remainder depends on the number of rows and threads. `torch.exp` uses one exponential for
    all elements; sums, quotients and products are rounded correctly.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate32 = gate.float()
    return (gate32 / (-gate32).exp_().add_(1)).to(gate.dtype) * up


def tiled_moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """`moe_experts` in which every chosen expert computes all rows, so that shapes are fixed.

    Results for rows that did not choose the expert are discarded; the experts of a row are summed
    in ascending order.
    """
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        chosen = ids == expert  # [N, k], at most once per row
        weight = weights.masked_fill(~chosen, 0).sum(-1, keepdim=True)  # [N, 1]
        hidden = invariant_silu_mul(F.linear(x, gate_up[expert]))
        contribution = (F.linear(hidden, down[expert]) * weight).to(x.dtype)
        out = torch.where(chosen.any(-1, keepdim=True), out + contribution, out)
    return out
