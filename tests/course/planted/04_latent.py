"""MLA scales scores by the width of what is cached, not by that of a query head."""

from minillm.layers.mla import MLAttention

right = MLAttention.__init__


def built(self, config, mla, layer, prefix):
    right(self, config, mla, layer, prefix)
    self.scale = (mla.kv_lora_rank + mla.qk_rope_head_dim) ** -0.5


MLAttention.__init__ = built
