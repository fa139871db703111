"""Selects between Triton kernels by shape. Imported on a GPU only.

Shapes that no kernel supports use torch: products of many rows, unusual head sizes, and blocks as
long as a whole sequence.
"""

from typing import TypedDict

import torch
from torch import Tensor

from minillm.ops.batch import Batch, Codes, Pages
from minillm_kernels import gemv, mla, reference
from minillm_kernels import paged_attention as paged
from minillm_kernels.batch_invariant import tiled_attention
from minillm_kernels.gemv import norm_linear as norm_linear  # an operation of its own
from minillm_kernels.launch import MAX_HEAD_DIM
from minillm_kernels.mla_config import MAX_ROPE_DIM, MAX_VALUE_DIM
from minillm_kernels.moe_route import route as route

GEMV_ROWS = 8  # with more rows, cuBLAS is faster
# Rows in bf16 up to which a norm, its product and SwiGLU are one kernel, and not cuBLAS between two
# others. Not measured on a GPU yet (`make gpu ARGS="--only kernels"` does): by its bytes it should
# not lose up to here (`minillm_kernels/gemv.py`). It runs with any number.
FUSED_ROWS = 64


class Options(TypedDict):
    """Options of all attention kernels."""

    max_query_len: int | None
    batch_invariant: bool


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, in], [out, in], [out] -> [N, out]"""
    return (gemv if takes_rows(x) else reference).linear(x, weight, bias)


def takes_rows(x: Tensor) -> bool:
    """Whether the kernels for products of few rows take these."""
    return x.dim() == 2 and 0 < len(x) <= GEMV_ROWS


def takes_normed(x: Tensor) -> bool:
    """Whether `norm_linear` takes these rows."""
    most = FUSED_ROWS if x.dtype == torch.bfloat16 else GEMV_ROWS
    return 0 < len(x) <= most


def paged_attention(
    q: Tensor,
    pages: Pages,
    batch: Batch,
    scale: float,
    window: int | None,
    batch_invariant: bool = False,
) -> Tensor:
    """[N, H, D] -> [N, H, Dv]"""
    k_cache, v_cache = pages.key, pages.value
    where = (batch.query_start, batch.seq_lens, batch.block_tables, scale, window)
    options = Options(max_query_len=batch.max_query_len, batch_invariant=batch_invariant)
    if batch.tails is not None:  # `takes_tails`
        return paged.paged_attention(q, k_cache, v_cache, *where, **options, tails=batch.tails)
    value_dim, rope_dim = v_cache.shape[-1], k_cache.shape[-1] - v_cache.shape[-1]
    if v_cache.data_ptr() == k_cache.data_ptr():  # MLA: a value is the first part of its key
        if value_dim <= MAX_VALUE_DIM and 0 < rope_dim <= MAX_ROPE_DIM:
            return mla.mla_attention(q, k_cache, value_dim, *where, **options)
    elif takes_head_dims(k_cache, v_cache) and takes_heads(q, k_cache):
        return paged.paged_attention(q, k_cache, v_cache, *where, **options)
    fallback = tiled_attention if batch_invariant else reference.paged_attention
    return fallback(q, k_cache, v_cache, *where)


def takes_tails(q: Tensor, pages: Pages) -> bool:
    """Whether the kernels read the keys of token trees where they are: not those of MLA."""
    return (
        pages.value.data_ptr() != pages.key.data_ptr()
        and takes_head_dims(pages.key, pages.value)
        and takes_heads(q, pages.key)
    )


def takes_head_dims(*caches: Tensor) -> bool:
    """Whether the attention kernels support heads of this size."""
    return all(cache.shape[-1] % 8 == 0 and cache.shape[-1] <= MAX_HEAD_DIM for cache in caches)


def takes_heads(q: Tensor, k_cache: Tensor) -> bool:
    """Whether the attention kernels support this block size and number of heads per KV head."""
    _, num_kv_heads, block_size, _ = k_cache.shape
    return block_size <= paged.MAX_BLOCK_SIZE and q.shape[1] <= paged.MAX_GROUP * num_kv_heads


def takes_codes(x: Tensor, codes: Codes) -> bool:
    """Whether the kernels support heads x [N, H, D] with these pages of codes."""
    return takes_head_dims(codes[0]) and x.shape[1] <= paged.MAX_GROUP * codes[0].shape[1]
