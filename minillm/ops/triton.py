"""Where an operation on a GPU has a choice between kernels. Imported on a GPU only.

A shape that no kernel takes goes to torch, which is as right: a product of many rows, or a
head_dim that no real model has.
"""

from torch import Tensor

from minillm_kernels import batch_invariant, gemv, mla, reference
from minillm_kernels import paged_attention as paged
from minillm_kernels.launch import MAX_HEAD_DIM

GEMV_ROWS = 8  # above, cuBLAS has enough rows for its tiles


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[N, in], [out, in], [out] -> [N, out]"""
    narrow = x.dim() == 2 and 0 < len(x) <= GEMV_ROWS
    return (gemv if narrow else reference).linear(x, weight, bias)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    max_query_len: int | None,
) -> Tensor:
    """[N, H, D] -> [N, H, Dv]"""
    where = (query_start, seq_lens, block_tables, scale, window)
    if v_cache.data_ptr() == k_cache.data_ptr():  # MLA: a value is the first part of its key
        value_dim = v_cache.shape[-1]
        return mla.mla_attention(q, k_cache, value_dim, *where, max_query_len=max_query_len)
    if not takes_head_dims(k_cache, v_cache):
        return reference.paged_attention(q, k_cache, v_cache, *where)
    return paged.paged_attention(q, k_cache, v_cache, *where, max_query_len=max_query_len)


def tiled_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None,
    max_query_len: int | None,
) -> Tensor:
    """The same in the kernels' batch-invariant mode."""
    where = (query_start, seq_lens, block_tables, scale, window)
    if v_cache.data_ptr() == k_cache.data_ptr():
        return mla.mla_attention(q, k_cache, v_cache.shape[-1], *where, batch_invariant=True)
    if not takes_head_dims(k_cache, v_cache):
        return batch_invariant.tiled_attention(q, k_cache, v_cache, *where)
    return paged.paged_attention(q, k_cache, v_cache, *where, batch_invariant=True)


def takes_head_dims(*caches: Tensor) -> bool:
    """Whether the attention kernels have tiles for heads of this size."""
    return all(cache.shape[-1] % 8 == 0 and cache.shape[-1] <= MAX_HEAD_DIM for cache in caches)
