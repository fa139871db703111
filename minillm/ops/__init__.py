"""One function per operation. Backends hide behind these names; the engine calls nothing else."""

from minillm_kernels.batch_invariant import invariant_silu_mul, tiled_attention, tiled_moe_experts
from minillm_kernels.reference import (
    causal_attention,
    moe_experts,
    moe_route,
    paged_attention,
    rms_norm,
    rotate,
    silu_mul,
)

__all__ = [
    "causal_attention",
    "invariant_silu_mul",
    "moe_experts",
    "moe_route",
    "paged_attention",
    "rms_norm",
    "rotate",
    "silu_mul",
    "tiled_attention",
    "tiled_moe_experts",
]
