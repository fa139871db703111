"""The operations of the engine, one function each. Every call is dispatched to a backend.

`minillm_kernels.reference` defines each operation. Tensors on a GPU go to Triton kernels, tensors
on a CPU to C functions (`dispatch` and `cpu` define when), all others to the reference itself.
Kernels are imported, and C is compiled, at first use.
"""

from types import ModuleType

import torch
from torch import Tensor

from minillm.ops import cpu, cpu_int8_cache
from minillm.ops.batch import AttentionMode, Batch, Codes, Pages, Prologue, codes_of
from minillm.ops.dispatch import backend_of as backend_of
from minillm.ops.dispatch import uses_kernels as uses_kernels
from minillm.ops.slots import untangled
from minillm_kernels import batch_invariant, int8_cache, reference
from minillm_kernels.reference import causal_attention as causal_attention
from minillm_kernels.reference import moe_route as moe_route


def _row_module(x: Tensor, *weights: Tensor | None) -> ModuleType:
    """The module that computes rows of these tensors: `fused`, `cpu` or `reference`."""
    if not uses_kernels(x, *weights):
        return cpu if cpu.takes(x, *weights) else reference
    from minillm_kernels import fused

    return fused


def _torch_row_module(x: Tensor, *weights: Tensor | None) -> ModuleType:
    """The same, for operations without a C function."""
    module = _row_module(x, *weights)
    return reference if module is cpu else module


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[.., d] -> [.., d]"""
    return _row_module(x, weight).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, d], [N, d] -> norm of the sum, and the sum."""
    return _row_module(x, residual, weight).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[N, 2 I] -> [N, I]"""
    return _row_module(gate_up).silu_mul(gate_up)


def invariant_silu_mul(gate_up: Tensor) -> Tensor:
    """Batch-invariant `silu_mul`: equal inputs give equal bits at any index of the tensor."""
    if uses_kernels(gate_up) or cpu.takes(gate_up):
        return silu_mul(gate_up)
    return batch_invariant.invariant_silu_mul(gate_up)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """[N], [V, d] -> [N, d]"""
    return _torch_row_module(weight).embedding(token_ids, weight)


def cos_sin(
    positions: Tensor, frequencies: Tensor, factor: float, plain: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotary angles: [N], float32 [D / 2] -> cos and sin times `factor`, [N, D / 2] each."""
    in_c = not plain and frequencies.dtype == torch.float32 and cpu.takes(frequencies)
    return (cpu if in_c else reference).cos_sin(positions, frequencies, factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """[N, H, D] -> [N, H, D]"""
    return _torch_row_module(x).rotate(x, cos, sin, interleaved)


def write_cache(key: Tensor, value: Tensor | None, pages: Pages, slot_mapping: Tensor) -> None:
    """Write keys [N, Hkv, D] and values [N, Hkv, Dv] to their slots; `value` is None with MLA."""
    if value is not None and (codes := codes_of(pages)):
        return _pages_of_codes(key, codes).write_cache(key, value, *codes, slot_mapping)
    _torch_row_module(key, value).write_cache(key, value, pages.key, pages.value, slot_mapping)


def _pages_of_codes(x: Tensor, codes: Codes) -> ModuleType:
    """The backend of pages of codes for heads x [N, H, D], C apart."""
    if uses_kernels(x):
        from minillm.ops import triton

        if triton.takes_codes(x, codes):
            from minillm_kernels import int8_pages

            return int8_pages
    return int8_cache


def has_int8_kernels(device: torch.device, head_dim: int) -> bool:
    """Whether a GPU has kernels for pages of codes: torch would wait for it in each layer."""
    if backend_of(device).name != "triton":
        return False
    from minillm.ops import triton

    return triton.takes_head_dims(torch.empty(0, head_dim))


def norm_rope(
    qkv: Tensor, prologue: Prologue, rope: tuple[Tensor, Tensor], mode: AttentionMode = "fast"
) -> tuple[Tensor, Tensor, Tensor]:
    """Split heads, apply QK norm and RoPE: [N, H + 2 Hkv, D] -> query [N, H, D], key and value
    [N, Hkv, D]."""
    norm = reference.rms_norm if mode == "plain" else rms_norm
    kv_heads = prologue.num_kv_heads
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if prologue.q_norm is not None and prologue.k_norm is not None:
        q, k = norm(q, prologue.q_norm, prologue.eps), norm(k, prologue.k_norm, prologue.eps)
    q = rotate(q, *rope, prologue.interleaved)
    return q, rotate(k, *rope, prologue.interleaved), v


def norm_rope_write(
    qkv: Tensor,
    prologue: Prologue,
    rope: tuple[Tensor, Tensor],
    pages: Pages,
    slot_mapping: Tensor,
    mode: AttentionMode = "fast",
) -> Tensor:
    """`norm_rope`, then write keys and values to the cache: [N, H + 2 Hkv, D] -> query [N, H, D].

    One fused kernel or C function, if it supports this head size.
    """
    _, q_norm, k_norm, eps, interleaved = prologue
    rows = reference if mode == "plain" else _row_module(qkv, q_norm, k_norm)
    if (codes := codes_of(pages)) and rows is cpu and cpu_int8_cache.takes(qkv, codes):
        return cpu_int8_cache.norm_rope_write(qkv, prologue, rope, codes, slot_mapping)
    if codes and mode == "fast" and (kernels := _pages_of_codes(qkv, codes)) is not int8_cache:
        norms = q_norm, k_norm, eps
        return kernels.norm_rope_write(qkv, *norms, *rope, interleaved, *codes, slot_mapping)
    if rows is reference or codes or not _takes_heads(rows, pages.key):
        q, k, v = norm_rope(qkv, prologue, rope, mode)
        write_cache(k, v, pages, slot_mapping)
        return q
    return rows.norm_rope_write(
        qkv, q_norm, k_norm, eps, *rope, interleaved, pages.key, pages.value, slot_mapping
    )


def _takes_heads(rows: ModuleType, cache: Tensor) -> bool:
    """Whether `norm_rope_write` of this backend supports the head size of this cache."""
    if rows is cpu:
        return cpu.takes_heads(cache)
    from minillm.ops import triton

    return triton.takes_head_dims(cache)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[N, in], [out, in], [out] -> [N, out]"""
    if not uses_kernels(x, weight, bias):
        return reference.linear(x, weight, bias)
    from minillm.ops import triton

    return triton.linear(x, weight, bias)


def paged_attention(
    q: Tensor,
    pages: Pages,
    batch: Batch,
    scale: float,
    window: int | None = None,
    mode: AttentionMode = "fast",
) -> Tensor:
    """Causal attention of q [N, H, D] over the batch's sequences -> [N, H, Dv]."""
    if batch.tails is not None and not _takes_tails(q, pages, scale, mode):
        pages, batch = untangled(pages, batch)
    lists = batch.query_start, batch.seq_lens, batch.block_tables
    if codes := codes_of(pages):  # each mode has the same arithmetic
        if mode != "plain" and scale > 0:
            if cpu_int8_cache.takes(q, codes):
                return cpu_int8_cache.paged_attention(q, codes, batch, scale, window)
            if (kernels := _pages_of_codes(q, codes)) is not int8_cache:
                return kernels.paged_attention(
                    q, *codes, *lists, scale, window, max_query_len=batch.max_query_len,
                    tails=batch.tails,
                )  # fmt: skip
        return int8_cache.paged_attention(q, *codes, *lists, scale, window)
    if mode != "plain" and uses_kernels(q, pages.key, pages.value):
        from minillm.ops import triton

        return triton.paged_attention(q, pages, batch, scale, window, mode == "invariant")
    if mode == "fast" and scale > 0 and cpu.takes_attention(q, pages.key, pages.value):
        return cpu.paged_attention(q, pages, batch, scale, window)
    if mode == "invariant":
        return batch_invariant.tiled_attention(q, pages.key, pages.value, *lists, scale, window)
    return reference.paged_attention(q, pages.key, pages.value, *lists, scale, window)


def _takes_tails(q: Tensor, pages: Pages, scale: float, mode: AttentionMode) -> bool:
    """Whether attention reads the keys of token trees where they are."""
    if codes := codes_of(pages):
        in_c = cpu_int8_cache.takes(q, codes)
        kernels = not in_c and _pages_of_codes(q, codes) is not int8_cache
        return mode != "plain" and scale > 0 and (in_c or kernels)
    if mode == "fast" and uses_kernels(q, pages.key, pages.value):
        from minillm.ops import triton

        return triton.takes_tails(q, pages)
    return mode == "fast" and scale > 0 and cpu.takes_attention(q, pages.key, pages.value)


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """[N, d], [E, 2 I, d], [E, d, I], [N, k], [N, k] -> [N, d]"""
    if not uses_kernels(x, gate_up, down, weights):
        return reference.moe_experts(x, gate_up, down, weights, ids)
    from minillm_kernels import moe

    return moe.moe_experts(x, gate_up, down, weights, ids)


def tiled_moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """Batch-invariant `moe_experts`: a token's result does not depend on the other tokens."""
    if not uses_kernels(x, gate_up, down, weights):
        return batch_invariant.tiled_moe_experts(x, gate_up, down, weights, ids)
    from minillm_kernels import moe

    return moe.moe_experts(x, gate_up, down, weights, ids, batch_invariant=True)
