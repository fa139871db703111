"""The block of OLMo-2: norms behind attention and MLP, and over all heads of q and of k."""

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.errors import UnsupportedFeatureError
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend
from minillm.layers.mlp import MLP
from minillm.layers.norm import RMSNorm
from minillm.ops.batch import Batch


class WholeNormAttention(Attention):
    """Attention with one norm over all query heads, and one over all key heads."""

    def __init__(self, config: ModelConfig, layer: int, prefix: str):
        super().__init__(config, layer, prefix)
        dim, eps = self.head_dim, config.rms_norm_eps
        self.all_q_norm = RMSNorm(f"{prefix}q_norm", self.num_heads * dim, eps)
        self.all_k_norm = RMSNorm(f"{prefix}k_norm", self.num_kv_heads * dim, eps)

    def project(self, x: Tensor) -> Tensor:
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv_proj(x).split((q_size, kv_size, kv_size), dim=-1)
        return torch.cat((self.all_q_norm(q), self.all_k_norm(k), v), dim=-1)


class PostNormLayer(nn.Module):
    """Attention and MLP, each with a norm of its output and a residual connection (OLMo team, 2025,
    arXiv 2501.00656, section 2.1)."""

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        if config.mla or config.moe:
            raise UnsupportedFeatureError(f"{config.family} with MLA or experts is not supported.")
        prefix, d, eps = f"model.layers.{layer}.", config.hidden_size, config.rms_norm_eps
        self.attention = WholeNormAttention(config, layer, f"{prefix}self_attn.")
        self.attention_norm = RMSNorm(f"{prefix}post_attention_layernorm", d, eps)
        self.mlp = MLP(config, f"{prefix}mlp.")
        self.mlp_norm = RMSNorm(f"{prefix}post_feedforward_layernorm", d, eps)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        kv: AttentionBackend,
    ) -> tuple[Tensor, Tensor]:
        """x and residual [N, d] -> x and residual [N, d], as `DecoderLayer.forward`."""
        x = x if residual is None else x + residual
        x = x + self.attention_norm(self.attention(x, rope, batch, kv))
        return self.mlp_norm(self.mlp(x)), x
