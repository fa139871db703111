"""What a block of the KV cache holds and so what it costs: one formula for plan, cost and pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from minillm.config import ModelConfig


@dataclass(frozen=True)
class CacheSpec:
    """What one layer keeps of each token.

    With MLA there is one KV head whose value is a prefix of its key: `value_dim` values of the
    `key_dim` cached ones, stored once.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False

    def block_shapes(self, block_size: int) -> Mapping[str, tuple[int, int, int]]:
        """The tensors of a block of one layer, by name: [Hkv, block_size, D] each."""
        dims = {"key": self.key_dim}
        if not self.value_in_key:
            dims["value"] = self.value_dim
        return {name: (self.num_kv_heads, block_size, dim) for name, dim in dims.items()}

    def block_values(self, block_size: int) -> int:
        """Values in a block of one layer; a block of 1 is a token."""
        return sum(map(prod, self.block_shapes(block_size).values()))

    def block_bytes(self, block_size: int, value_bytes: int) -> int:
        """Bytes of a block of one layer, whose values have `value_bytes` each."""
        return self.block_values(block_size) * value_bytes


def cache_spec(config: ModelConfig) -> CacheSpec:
    """The cache that every layer of this model needs."""
    if config.mla:
        rank = config.mla.kv_lora_rank
        return CacheSpec(1, rank + config.mla.qk_rope_head_dim, rank, value_in_key=True)
    return CacheSpec(config.num_kv_heads, config.head_dim, config.head_dim)
