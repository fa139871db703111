"""The oracle: every operation of the engine in plain torch, written to be read and believed.

A faster backend (CPU, Triton) is right when it agrees with this file. All functions are pure and
differentiable. Shapes: N tokens of the flat batch, B sequences, H query heads, Hkv KV heads
(G = H / Hkv query heads share one), D head dimension, S cached positions, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019). [.., d]"""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's gate (Shazeer, 2020): silu(gate) * up. [N, 2 I] -> [N, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., 2021), computed in float32.

    `x` is [N, H, D]; `cos` and `sin` are [N, D/2], one angle per pair of dimensions. A pair is
    (i, i + D/2), or (2i, 2i + 1) if `interleaved`; the result has the first layout in both
    cases, which no dot product of two rotated vectors can tell.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [N, 1, D/2]
    x32 = x.float()
    first, second = (x32[..., 0::2], x32[..., 1::2]) if interleaved else x32.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def visible_positions(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Bool mask [T, S]: query i stands at position S - T + i and sees itself and the past.

    With a sliding `window` it sees only the latest `window` positions, itself included.
    """
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)  # [T, 1]
    key = torch.arange(num_keys, device=device)  # [S]
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """Attention of the last T positions of one sequence over all S of them.

    `q` [T, H, D], `k` [Hkv, S, D], `v` [Hkv, S, Dv] -> [T, H, Dv]. The G query heads of a KV
    head become the head dimension of a batch of Hkv problems, so K and V are never repeated.
    """
    num_queries, num_heads, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[:2]
    group = num_heads // num_kv_heads
    if num_queries == 1 and (window is None or window >= num_keys):
        # One query sees every key: its G heads can stand in for G query positions.
        out = F.scaled_dot_product_attention(
            q.view(1, num_kv_heads, group, head_dim), k[None], v[None], scale=scale
        )
        return out.reshape(1, num_heads, v.shape[-1])
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(
        1, 2, 0, 3
    )  # [Hkv, G, T, D]
    k = k.unsqueeze(1).expand(-1, group, -1, -1)  # [Hkv, G, S, D], no copy
    v = v.unsqueeze(1).expand(-1, group, -1, -1)
    whole = num_queries == num_keys and window is None
    mask = None if whole else visible_positions(num_queries, num_keys, window, q.device)
    out = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=mask, is_causal=whole, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, v.shape[-1])


def gather_blocks(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The first `seq_len` positions of one sequence: [blocks, Hkv, block_size, D] -> [Hkv, S, D].

    A sequence that lies in one block is a view; otherwise its blocks are joined by a copy.
    """
    num_blocks = -(-seq_len // cache.shape[2])
    if num_blocks == 1:
        return cache[int(block_table[0]), :, :seq_len]
    blocks = cache.transpose(0, 1)[:, block_table[:num_blocks]]  # [Hkv, n, block_size, D]
    return blocks.flatten(1, 2)[:, :seq_len]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Attention of a flat batch over paged K and V (Kwon et al., 2023).

    `q` [N, H, D]; caches [blocks, Hkv, block_size, D or Dv]; `query_start` [B + 1] bounds the
    rows of each sequence; `seq_lens` [B] counts its positions, those of `q` included;
    `block_tables` [B, M]. Returns [N, H, Dv].
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row + 1])
        k = gather_blocks(k_cache, block_tables[row], length)
        v = gather_blocks(v_cache, block_tables[row], length)
        out[rows] = causal_attention(q[rows], k, v, scale, window)
    return out


def moe_route(
    scores: Tensor,
    bias: Tensor | None,
    num_chosen: int,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "max",
    normalize: bool = True,
) -> tuple[Tensor, Tensor]:
    """Choose experts: `scores` [N, E] -> weights [N, k] (float32) and expert ids [N, k].

    `bias` [E] shifts the scores for choosing only (DeepSeek-V3, 2024, eq. 16). With groups, the
    choice is limited to the best `topk_groups` of them (DeepSeek-V2, 2024, section 2.2.2).
    """
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        grouped = choice.view(len(choice), num_groups, -1)  # [N, groups, E / groups]
        best = grouped.topk(2 if group_score == "top2" else 1, dim=-1).values.sum(-1)
        chosen = torch.zeros_like(best, dtype=torch.bool)
        chosen.scatter_(1, best.topk(topk_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1)
    ids = choice.topk(num_chosen, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return weights, ids


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Run each token through its chosen SwiGLU experts and sum, weighted.

    `x` [N, d], `gate_up` [E, 2 I, d], `down` [E, d, I], `weights` and `ids` [N, k] -> [N, d].
    """
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = torch.where(ids == expert)
        hidden = silu_mul(F.linear(x[token], gate_up[expert]))
        contribution = F.linear(hidden, down[expert]) * weights[token, choice, None]
        out = out.index_add(0, token, contribution.to(x.dtype))
    return out
