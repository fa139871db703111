"""Multi-head latent attention: the KV cache holds one latent per token, shared by all heads."""

import torch
from torch import Tensor, nn

from minillm import ops
from minillm.config import MLAConfig, ModelConfig
from minillm.layers.kv_cache import AttentionBackend
from minillm.layers.linear import Linear
from minillm.layers.norm import RMSNorm
from minillm.layers.rope import yarn_temperature
from minillm.ops.batch import Batch

LATENT_NORM_EPS = 1e-6  # fixed in DeepSeek's code, independent of rms_norm_eps


class MLAttention(nn.Module):
    """MLA in its absorbed form (DeepSeek-V2, 2024, section 2.1 and appendix C).

    A key is W_uk c for a latent c, and q . (W_uk c) = (W_uk^T q) . c: W_uk multiplies the query
    once instead of every cached latent. Attention is then MQA over [latent, rotated part] with the
    latent as value; W_uv maps its output to heads.
    """

    def __init__(self, config: ModelConfig, mla: MLAConfig, layer: int, prefix: str):
        super().__init__()
        self.layer, self.mla, self.num_heads = layer, mla, config.num_heads
        self.interleaved = config.rope.interleaved
        self.window = config.sliding_window(layer)
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.scale = head_dim**-0.5
        if config.rope.rope_type != "default" and config.rope.mscale_all_dim:
            self.scale *= yarn_temperature(config.rope.factor, config.rope.mscale_all_dim) ** 2
        d, heads = config.hidden_size, config.num_heads
        q_size = heads * head_dim
        self.q_a_proj = self.q_a_norm = None
        if mla.q_lora_rank is None:
            self.q_proj = Linear(prefix, d, {"q_proj": q_size})
        else:
            rank = mla.q_lora_rank
            self.q_a_proj = Linear(prefix, d, {"q_a_proj": rank}, config.qkv_bias)
            self.q_a_norm = RMSNorm(f"{prefix}q_a_layernorm", rank, LATENT_NORM_EPS)
            self.q_proj = Linear(prefix, rank, {"q_b_proj": q_size})
        latent_size = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.kv_a_proj = Linear(prefix, d, {"kv_a_proj_with_mqa": latent_size}, config.qkv_bias)
        self.kv_a_norm = RMSNorm(f"{prefix}kv_a_layernorm", mla.kv_lora_rank, LATENT_NORM_EPS)
        kv_b_size = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        self.kv_b_proj = Linear(prefix, mla.kv_lora_rank, {"kv_b_proj": kv_b_size})
        self.kv_b_proj.is_absorbed = True
        o_outputs = {"o_proj": d}
        self.o_proj = Linear(prefix, heads * mla.v_head_dim, o_outputs, config.output_bias)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: AttentionBackend
    ) -> Tensor:
        """[N, d] -> [N, d]"""
        mla = self.mla
        q = self.q_proj(self._query_input(x)).view(len(x), self.num_heads, -1)  # [N, H, Dn + Dr]
        q_nope, q_rope = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        absorbed = self.kv_b_proj  # W_uk and W_uv
        q_latent = absorbed.method.absorb(absorbed, q_nope)  # [N, H, R]
        q_rope = ops.rotate(q_rope, *rope, self.interleaved)

        latent, k_rope = self.kv_a_proj(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        k_rope = ops.rotate(k_rope.unsqueeze(1), *rope, self.interleaved)  # [N, 1, Dr]
        key = torch.cat((self.kv_a_norm(latent).unsqueeze(1), k_rope), dim=-1)  # [N, 1, R + Dr]
        kv.write(self.layer, key, None, batch)
        query = torch.cat((q_latent, q_rope), dim=-1)  # [N, H, R + Dr]
        out = kv.attend(self.layer, query, batch, self.scale, self.window)  # [N, H, R]
        values = absorbed.method.expand(absorbed, out, mla.v_head_dim)  # [N, H, Dv]
        return self.o_proj(values.flatten(1))

    def _query_input(self, x: Tensor) -> Tensor:
        if self.q_a_proj is None or self.q_a_norm is None:
            return x
        return self.q_a_norm(self.q_a_proj(x))
