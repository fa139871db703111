"""Grouped-query attention; MHA and MQA are special cases."""

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.layers.kv_cache import AttentionBackend, write_qkv
from minillm.layers.linear import Linear
from minillm.layers.norm import RMSNorm
from minillm.ops.batch import Batch, Prologue


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023). One KV head is MQA; H KV heads are MHA."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str):
        super().__init__()
        self.layer = layer
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.interleaved = config.rope.interleaved
        self.scale = config.head_dim**-0.5
        self.has_rope = config.has_rope(layer)
        self.window = config.sliding_window(layer)
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        outputs = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(prefix, config.hidden_size, outputs, config.qkv_bias)
        self.o_proj = Linear(prefix, q_size, {"o_proj": config.hidden_size}, config.output_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(f"{prefix}q_norm", self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(f"{prefix}k_norm", self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: AttentionBackend
    ) -> Tensor:
        """[N, d] -> [N, d]"""
        return self.o_proj(self.mix(self.project(x), rope, batch, kv))

    def mix(
        self, qkv: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: AttentionBackend
    ) -> Tensor:
        """Attention without its products: [N, (H + 2 Hkv) D] -> [N, H D]"""
        if not self.has_rope:  # angles of zero
            rope = torch.ones_like(rope[0]), torch.zeros_like(rope[1])
        heads = self.num_heads + 2 * self.num_kv_heads
        qkv = qkv.view(-1, heads, self.head_dim)  # [N, H + 2 Hkv, D]
        q = write_qkv(kv, self.layer, qkv, self._prologue(), rope, batch)
        out = kv.attend(self.layer, q, batch, self.scale, self.window)  # [N, H, D]
        return out.flatten(1)

    def project(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, (H + 2 Hkv) D]"""
        return self.qkv_proj(x)

    def _prologue(self) -> Prologue:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return Prologue(self.num_kv_heads, None, None, 0.0, self.interleaved)
        weights = q_norm.weight, k_norm.weight
        return Prologue(self.num_kv_heads, *weights, q_norm.eps, self.interleaved)
