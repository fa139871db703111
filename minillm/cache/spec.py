"""Shapes and bytes of a KV cache block, for the memory plan, the cost model and the block pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from minillm.config import ModelConfig


@dataclass(frozen=True)
class CacheSpec:
    """What one layer caches per token: a key and a value for each KV head.

    MLA caches one latent vector of `key_dim` values, whose first `value_dim` are the value.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False

    def block_shapes(self, block_size: int) -> Mapping[str, tuple[int, int, int]]:
        """Shape [Hkv, block_size, D] of each tensor of one block in one layer, by name."""
        dims = {"key": self.key_dim}
        if not self.value_in_key:
            dims["value"] = self.value_dim
        return {name: (self.num_kv_heads, block_size, dim) for name, dim in dims.items()}

    def block_values(self, block_size: int) -> int:
        """Number of cached values in one block of one layer; `block_size` 1 gives one token."""
        return sum(map(prod, self.block_shapes(block_size).values()))

    def block_bytes(self, block_size: int, value_bytes: int) -> int:
        """Bytes of one block in one layer, with `value_bytes` bytes per value."""
        return self.block_values(block_size) * value_bytes


def cache_spec(config: ModelConfig) -> CacheSpec:
    """The spec of every layer of this model."""
    if config.mla:
        rank = config.mla.kv_lora_rank
        return CacheSpec(1, rank + config.mla.qk_rope_head_dim, rank, value_in_key=True)
    return CacheSpec(config.num_kv_heads, config.head_dim, config.head_dim)
