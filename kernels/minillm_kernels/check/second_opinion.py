"""Attention against torch's own kernels, in case our oracle shares a mistake with what it judges.

`scaled_dot_product_attention` runs everywhere; `torch.nn.attention.varlen` (FlashAttention over
flat batches, CUDA only) joins where it exists. Both round as half precision does, so the tolerance
is twice that of a comparison with float64.
"""

from collections.abc import Callable, Mapping
from itertools import pairwise
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.check.case import TOLERANCE, compare, generator, normal
from minillm_kernels.check.pages import paged

LENGTHS = (1, 60, 17, 130)
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16
SCALE = HEAD_DIM**-0.5


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one sequence's last queries: [T, H, D], [S, Hkv, D] -> [T, H, Dv]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    visible = visible.tril(k.shape[2] - q.shape[2])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=SCALE, enable_gqa=True)
    return out[0].transpose(0, 1)


def varlen(q: Tensor, k: Tensor, v: Tensor, start: Tensor) -> Tensor | None:
    """Whole sequences by torch's FlashAttention; None where there is none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    if q.device.type != "cuda" or q.dtype == torch.float32:
        return None
    k, v = (x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, dim=1) for x in (k, v))
    longest = max(LENGTHS)
    out = varlen_attn(q, k, v, start, start, longest, longest, scale=SCALE, window_size=(-1, 0))
    return out if isinstance(out, Tensor) else None


def judge_flash_attention(dtype: torch.dtype, device: str) -> None:
    """Whole sequences of several lengths, causal."""
    from minillm_kernels.flash_attention import flash_attention

    rng, total = generator(0), sum(LENGTHS)
    q = normal(rng, (total, NUM_HEADS, HEAD_DIM), dtype, device)
    k, v = (normal(rng, (total, NUM_KV_HEADS, HEAD_DIM), dtype, device) for _ in range(2))
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    start = torch.tensor(bounds, dtype=torch.int32, device=device)
    out = flash_attention(q, k, v, start, start, SCALE)
    parts = [slice(*pair) for pair in pairwise(bounds)]
    expected = torch.cat([sdpa(q[part], k[part], v[part]) for part in parts])
    compare(out, expected, "flash_attention beside SDPA", 2 * TOLERANCE[dtype])
    other = varlen(q, k, v, start)
    if other is not None:
        compare(out, other, "flash_attention beside varlen_attn", 2 * TOLERANCE[dtype])


def judge_paged_attention(dtype: torch.dtype, device: str) -> None:
    """Decodes and chunks of several lengths in one flat batch."""
    from minillm_kernels.paged_attention import paged_attention

    rng, counts = generator(1), (1, 1, 17, 40)
    pages = paged(rng, LENGTHS, BLOCK_SIZE, NUM_KV_HEADS, (HEAD_DIM,) * 2, dtype, device)
    q = normal(rng, (sum(counts), NUM_HEADS, HEAD_DIM), dtype, device)
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    start = torch.tensor(bounds, dtype=torch.int32, device=device)
    k_cache, v_cache = pages.caches
    tables, lengths = pages.block_tables, pages.seq_lens
    out = paged_attention(q, k_cache, v_cache, start, lengths, tables, SCALE)
    expected = []
    for row, (length, part) in enumerate(zip(LENGTHS, pairwise(bounds), strict=True)):
        blocks = pages.block_tables[row, : -(-length // BLOCK_SIZE)]
        k, v = (
            cache[blocks].transpose(1, 2).flatten(0, 1)[:length]  # [S, Hkv, D]
            for cache in pages.caches
        )
        expected.append(sdpa(q[slice(*part)], k, v))
    compare(out, torch.cat(expected), "paged_attention beside SDPA", 2 * TOLERANCE[dtype])


JUDGES: Mapping[str, Callable[[torch.dtype, str], None]] = MappingProxyType(
    {"flash_attention": judge_flash_attention, "paged_attention": judge_paged_attention}
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
