"""One function per operation. Backends hide behind these names; the engine calls nothing else.

Each is described in `minillm_kernels.reference`. A tensor on a GPU goes to a Triton kernel that
agrees with it, one on a CPU to a C function that does (`dispatch` and `cpu` say when), any other to
the reference itself. Kernels are imported, and C is compiled, when the first tensor needs it.
"""

from types import ModuleType

from torch import Tensor

from minillm.ops import cpu
from minillm.ops.dispatch import backend_of, uses_kernels
from minillm_kernels import batch_invariant, reference
from minillm_kernels.reference import causal_attention, moe_route

__all__ = [
    "add_rms_norm",
    "backend_of",
    "causal_attention",
    "embedding",
    "fuses_projections",
    "invariant_silu_mul",
    "linear",
    "moe_experts",
    "moe_route",
    "norm_rope_write",
    "paged_attention",
    "plain_attention",
    "rms_norm",
    "rotate",
    "silu_mul",
    "tiled_attention",
    "tiled_moe_experts",
    "uses_kernels",
    "write_cache",
]


def _rows(x: Tensor, *weights: Tensor | None) -> ModuleType:
    """Whose operations on rows this tensor gets."""
    if not uses_kernels(x, *weights):
        return cpu if cpu.takes(x, *weights) else reference
    from minillm_kernels import fused

    return fused


def _torch_rows(x: Tensor, *weights: Tensor | None) -> ModuleType:
    """The same for operations that have no C function."""
    found = _rows(x, *weights)
    return reference if found is cpu else found


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[.., d] -> [.., d]"""
    return _rows(x, weight).rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """[N, d], [N, d] -> the norm of their sum, and the sum."""
    return _rows(x, residual, weight).add_rms_norm(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[N, 2 I] -> [N, I]"""
    return _rows(gate_up).silu_mul(gate_up)


def invariant_silu_mul(gate_up: Tensor) -> Tensor:
    """`silu_mul` with the same bits wherever in the tensor a number is, as in a kernel always."""
    if uses_kernels(gate_up) or cpu.takes(gate_up):
        return silu_mul(gate_up)
    return batch_invariant.invariant_silu_mul(gate_up)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """[N], [V, d] -> [N, d]"""
    return _torch_rows(weight).embedding(token_ids, weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """[N, H, D] -> [N, H, D]"""
    return _torch_rows(x).rotate(x, cos, sin, interleaved)


def write_cache(
    key: Tensor, value: Tensor | None, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Keys [N, Hkv, D] and values [N, Hkv, Dv] to their slots; `value` is None with MLA."""
    _torch_rows(key, value).write_cache(key, value, k_cache, v_cache, slot_mapping)


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
    """[N, H + 2 Hkv, D] -> query [N, H, D], with keys and values cached."""
    return _rows(qkv, q_weight, k_weight).norm_rope_write(
        qkv, q_weight, k_weight, eps, cos, sin, interleaved, k_cache, v_cache, slot_mapping
    )


def fuses_projections(cache: Tensor) -> bool:
    """Whether `norm_rope_write` is one kernel, or one C function, for heads of this cache."""
    if not uses_kernels(cache):
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
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """[N, H, D] -> [N, H, Dv]; `max_query_len` spares a GPU the kernel for longer queries."""
    where = (query_start, seq_lens, block_tables, scale, window)
    if not uses_kernels(q, k_cache, v_cache):
        if scale > 0 and cpu.takes_attention(q, k_cache, v_cache):
            return cpu.paged_attention(q, k_cache, v_cache, *where, max_query_len)
        return reference.paged_attention(q, k_cache, v_cache, *where)
    from minillm.ops import triton

    return triton.paged_attention(q, k_cache, v_cache, *where, max_query_len)


def plain_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """`paged_attention` in plain torch, on every device."""
    where = (query_start, seq_lens, block_tables, scale, window)
    return reference.paged_attention(q, k_cache, v_cache, *where)


def tiled_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    max_query_len: int | None = None,
) -> Tensor:
    """`paged_attention` whose bits for a token do not depend on what is computed beside it."""
    where = (query_start, seq_lens, block_tables, scale, window)
    if not uses_kernels(q, k_cache, v_cache):
        return batch_invariant.tiled_attention(q, k_cache, v_cache, *where)
    from minillm.ops import triton

    return triton.paged_attention(q, k_cache, v_cache, *where, max_query_len, batch_invariant=True)


def moe_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """[N, d], [E, 2 I, d], [E, d, I], [N, k], [N, k] -> [N, d]"""
    if not uses_kernels(x, gate_up, down, weights):
        return reference.moe_experts(x, gate_up, down, weights, ids)
    from minillm_kernels import moe

    return moe.moe_experts(x, gate_up, down, weights, ids)


def tiled_moe_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """`moe_experts` whose bits for a token do not depend on what is computed beside it."""
    if not uses_kernels(x, gate_up, down, weights):
        return batch_invariant.tiled_moe_experts(x, gate_up, down, weights, ids)
    from minillm_kernels import moe

    return moe.moe_experts(x, gate_up, down, weights, ids, batch_invariant=True)
