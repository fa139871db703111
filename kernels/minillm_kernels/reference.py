"""The reference: every operation of the engine in plain torch.

Faster backends (CPU, Triton) are tested against this file. All functions are pure and
differentiable. Shapes: N tokens of the flat batch, B sequences, H query heads, Hkv KV heads
(G = H / Hkv query heads share one), D head dimension, S cached positions, E experts.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.philox import Purpose, random_words_of_vocabulary, to_gumbel

FEW_QUERIES = 16  # up to so many queries of a sequence count as decoding (one token and drafts)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019). [.., d]"""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual addition and RMSNorm: [N, d] -> norm of the sum [N, d], sum [N, d].

    The sum is rounded to the tensors' dtype before the norm, as if it had been stored.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def silu_mul(gate_up: Tensor) -> Tensor:
    """The activation of SwiGLU (Shazeer, 2020): silu(gate) * up. [N, 2 I] -> [N, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows `token_ids` [N] of `weight` [V, d] -> [N, d]"""
    return F.embedding(token_ids, weight)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b: [N, in], [out, in], [out] -> [N, out]"""
    return F.linear(x, weight, bias)


def norm_linear(
    x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float, weight: Tensor,
    bias: Tensor | None = None, gated: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`add_rms_norm` (a residual of None is zero), then `linear`, then `silu_mul` if `gated`:
    [N, in] -> [N, out], or [N, out / 2], and the sum [N, in]."""
    x = x if residual is None else x + residual
    product = F.linear(rms_norm(x, norm_weight, eps), weight, bias)
    return silu_mul(product) if gated else product, x


def cos_sin(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Rotary angles: [N], float32 [D / 2] -> cos and sin times `factor`, [N, D / 2] each."""
    angles = positions.float().unsqueeze(1) * frequencies
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotary position embedding (Su et al., 2021), computed in float32.

    `x` is [N, H, D]; `cos` and `sin` are [N, D/2], one angle per pair of dimensions. A pair is
    (i, i + D/2), or (2i, 2i + 1) if `interleaved`. The result always has the first layout; dot
    products of two rotated vectors do not depend on the layout.
    """
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [N, 1, D/2]
    x32 = x.float()
    first, second = (x32[..., 0::2], x32[..., 1::2]) if interleaved else x32.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def write_cache(
    key: Tensor, value: Tensor | None, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store keys [N, Hkv, D] and values [N, Hkv, Dv] in caches [blocks, Hkv, block_size, ..].

    Row n goes to slot `slot_mapping[n]` = block * block_size + offset, nowhere if that is
    negative; rows behind the end of `slot_mapping` are padding, too. `value` is None where values
    are a part of the keys (MLA).
    """
    slots = slot_mapping[: len(key)]
    kept = slots >= 0
    if not bool(kept.all()):
        slots, key = slots[kept], key[: len(slots)][kept]
        value = None if value is None else value[: len(kept)][kept]
    blocks, offsets = slots // k_cache.shape[2], slots % k_cache.shape[2]
    k_cache[blocks, :, offsets] = key[: len(slots)]
    if value is not None:
        v_cache[blocks, :, offsets] = value[: len(slots)]


def norm_rope_write(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
) -> Tensor:
    """Split the product of the three projections, apply q/k norm and RoPE, and cache k and v.

    `qkv` [N, H + 2 Hkv, D] is split into heads of q, k and v. q and k are normalised over D if
    there are weights [D] (Qwen3), and rotated by `cos` and `sin` [N, D/2]; k and v are stored as in
    `write_cache`. Returns q [N, H, D].
    """
    num_kv_heads = k_cache.shape[1]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    k = rotate(k, cos, sin, interleaved)
    write_cache(k, v, k_cache, v_cache, slot_mapping)
    return rotate(q, cos, sin, interleaved)


def visible_positions(
    num_queries: int, num_keys: int, window: int | None, device: torch.device
) -> Tensor:
    """Causal mask, bool [T, S]: query i is at position S - T + i and attends up to that position.

    With a sliding `window` it attends to the last `window` positions, including its own.
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
    whole = num_queries == num_keys and window is None
    if num_queries == 1 or (num_queries <= FEW_QUERIES and not whole):
        # The G heads of a KV head are treated as G positions, so that K is multiplied once.
        mask, rows = None, q.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
        rows = rows.reshape(1, num_kv_heads, num_queries * group, head_dim)
        if num_queries > 1 or (window is not None and window < num_keys):
            mask = visible_positions(num_queries, num_keys, window, q.device)
            mask = mask.repeat_interleave(group, 0)
        out = F.scaled_dot_product_attention(rows, k[None], v[None], attn_mask=mask, scale=scale)
        out = out.view(num_kv_heads, num_queries, group, v.shape[-1]).transpose(0, 1)
        return out.reshape(num_queries, num_heads, v.shape[-1])
    grouped = q.view(num_queries, num_kv_heads, group, head_dim).permute(
        1, 2, 0, 3
    )  # [Hkv, G, T, D]
    k = k.unsqueeze(1).expand(-1, group, -1, -1)  # [Hkv, G, S, D], no copy
    v = v.unsqueeze(1).expand(-1, group, -1, -1)
    mask = None if whole else visible_positions(num_queries, num_keys, window, q.device)
    out = F.scaled_dot_product_attention(
        grouped, k, v, attn_mask=mask, is_causal=whole, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(num_queries, num_heads, v.shape[-1])


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor, soft_cap: float | None = None
) -> Tensor:
    """The definition of attention, with the full matrix of scores.

    `q` [T, H, D], `k` [S, Hkv, D], `v` [S, Hkv, Dv], `visible` bool [T, S] -> [T, H, Dv]. With a
    `soft_cap` scores become cap * tanh(score / cap) (Gemma 2, 2024). A row without visible keys
    is 0.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # [S, H, D]
    scores = torch.einsum("thd,shd->hts", q, k) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~visible.any(-1, keepdim=True), 0)
    return torch.einsum("hts,shd->thd", weights, v)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    key_start: Tensor,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of B sequences whose queries and keys are concatenated, without padding (varlen).

    `q` [N, H, D], `k` [S, Hkv, D], `v` [S, Hkv, Dv]; `query_start` and `key_start` int32 [B + 1]
    bound the rows of each sequence. If `causal`, the last query of a sequence is at its last key;
    `window` needs `causal`. Returns [N, H, Dv].
    """
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[-1])
    starts, key_starts = query_start.tolist(), key_start.tolist()
    for row in range(len(starts) - 1):
        queries = slice(starts[row], starts[row + 1])
        keys = slice(key_starts[row], key_starts[row + 1])
        shape = queries.stop - queries.start, keys.stop - keys.start
        visible = torch.ones(shape, dtype=torch.bool, device=q.device)
        if causal:
            visible = visible_positions(*shape, window, q.device)
        out[queries] = plain_attention(q[queries], k[keys], v[keys], scale, visible, soft_cap)
    return out


def gather_blocks(cache: Tensor, block_table: Tensor, seq_len: int) -> Tensor:
    """The first `seq_len` positions of one sequence: [blocks, Hkv, block_size, D] -> [Hkv, S, D].

    A sequence in a single block is returned as a view, several blocks as a copy.
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
    soft_cap: float | None = None,
) -> Tensor:
    """Attention of a flat batch over paged K and V (Kwon et al., 2023).

    `q` [N, H, D]; caches [blocks, Hkv, block_size, D or Dv]; `query_start` [B + 1] bounds the
    rows of each sequence; `seq_lens` [B] counts its positions, including those of `q`;
    `block_tables` [B, M]. Returns [N, H, Dv]. Rows of a sequence of length 0 are 0; rows after the
    last sequence are padding, and their values are undefined.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    starts, lengths = query_start.tolist(), seq_lens.tolist()
    for row, length in enumerate(lengths):
        rows = slice(starts[row], starts[row + 1])
        if length == 0:  # a padded row
            out[rows] = 0
            continue
        k = gather_blocks(k_cache, block_tables[row], length)
        v = gather_blocks(v_cache, block_tables[row], length)
        if soft_cap is None:
            out[rows] = causal_attention(q[rows], k, v, scale, window)
        else:
            visible = visible_positions(rows.stop - rows.start, length, window, q.device)
            k, v = k.transpose(0, 1), v.transpose(0, 1)  # [S, Hkv, D]
            out[rows] = plain_attention(q[rows], k, v, scale, visible, soft_cap)
    return out


def mla_attention(
    q: Tensor,
    latent_cache: Tensor,
    value_dim: int,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """`paged_attention` in MLA's absorbed form (DeepSeek-V2, 2024, section 2.1): one KV head.

    `q` [N, H, R + Dr] is [absorbed, rotated]; `latent_cache` [blocks, 1, block_size, R + Dr]; the
    value of a position is the first `value_dim` = R numbers of its key. Returns [N, H, R].
    """
    value = latent_cache[..., :value_dim]
    return paged_attention(
        q, latent_cache, value, query_start, seq_lens, block_tables, scale, window
    )


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

    `bias` [E] is added to the scores for the choice only, not for the weights (DeepSeek-V3, 2024,
    eq. 16). With groups, the choice is limited to the best `topk_groups` groups (DeepSeek-V2, 2024,
    section 2.2.2).
    """
    choice = scores if bias is None else scores + bias
    if num_groups > 1:
        shape = len(choice), num_groups, choice.shape[1] // num_groups
        grouped = choice.view(shape)  # [N, groups, E / groups]
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
    """The weighted sum of each token's chosen SwiGLU experts.

    `x` [N, d], `gate_up` [E, 2 I, d], `down` [E, d, I], `weights` and `ids` [N, k] -> [N, d].
    """
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, choice = torch.where(ids == expert)
        hidden = silu_mul(F.linear(x[token], gate_up[expert]))
        contribution = F.linear(hidden, down[expert]) * weights[token, choice, None]
        out = out.index_add(0, token, contribution.to(x.dtype))
    return out


# ---- sampling --------------------------------------------------------------------------------


def argmax(logits: Tensor) -> Tensor:
    """The most probable token of each row; ties go to the smallest id: [K, V] -> int64 [K]"""
    return logits.argmax(dim=-1)


def gumbel_argmax(
    logits: Tensor,
    temperature: Tensor,
    min_p: Tensor,
    seed: Tensor,
    sample_index: Tensor,
    position: Tensor,
    purpose: int = Purpose.SAMPLE,
) -> Tensor:
    """Sample from softmax(logits / temperature): argmax(logits / temperature + Gumbel noise).

    Tokens with less than `min_p` times the largest probability are excluded (0: none). The noise
    of a token is a function of the other arguments and its id (`minillm_kernels.philox`).
    `logits` [K, V]; `temperature` (above 0) and `min_p` float32 [K]; `seed`, `sample_index` and
    `position` int64 [K]. Returns int64 [K]. -inf is never chosen.
    """
    scaled = scale(logits, temperature, min_p)
    words = random_words_of_vocabulary(
        seed, sample_index, position, Purpose(purpose), logits.shape[1]
    )
    return (scaled + to_gumbel(words)).argmax(dim=-1)


def scale(logits: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Temperature, then min-p (Nguyen et al., 2024): [K, V] -> float32 [K, V].

    The largest logit is subtracted first, so no division overflows and min-p is a threshold at
    log(min_p).
    """
    raw = logits.float()
    scaled = (raw - raw.amax(dim=-1, keepdim=True)) / temperature[:, None]
    return scaled.masked_fill(scaled < min_p.log()[:, None], float("-inf"))


def top_p_mask(mass: Tensor, goal: Tensor) -> Tensor:
    """Of masses in falling order of probability: those before which the goal is not reached."""
    return mass.cumsum(dim=-1) - mass < goal


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k, then top-p (Holtzman et al., 2019), with a sort: [K, V] -> float32 [K, V].

    Excluded tokens become -inf. `top_k` int32 [K], 0 or at least V is off; `top_p` float32 [K], 1
    is off. Ties of the k-th logit are kept. Top-p keeps the smallest set of the most probable
    tokens whose mass reaches p of the mass after top-k; among equal logits at the edge, the
    smallest ids are kept. The largest logit is subtracted.
    """
    scaled = logits.float() - logits.float().amax(dim=-1, keepdim=True)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(logits.shape[1], device=logits.device)
    last = (top_k.long() - 1).clamp(0, logits.shape[1] - 1)[:, None]
    kth = ordered.gather(1, last).masked_fill(top_k[:, None] <= 0, float("-inf"))
    ordered = ordered.masked_fill(ordered < kth, float("-inf"))
    mass = ordered.exp().double()
    goal = top_p.double()[:, None] * mass.sum(dim=-1, keepdim=True)
    kept = top_p_mask(mass, goal) | (top_p[:, None] >= 1) | (places == 0)
    ordered = ordered.masked_fill(~kept, float("-inf"))
    return torch.empty_like(scaled).scatter_(1, ids, ordered)
