"""Shapes and bytes of a KV cache block, for the memory plan, the cost model and the block pool."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from minillm.config import DTYPE_BYTES, ModelConfig
from minillm.errors import UnsupportedFeatureError

CODES: Mapping[str, str] = {  # of `kv_cache_dtype="int8"`
    "key": "uint8",
    "value": "int8",
    "key_scale": "float16",
    "value_scale": "float16",
}


@dataclass(frozen=True)
class CacheSpec:
    """What one layer caches per token: a key and a value for each KV head.

    MLA caches one latent vector of `key_dim` values, whose first `value_dim` are the value. With
    `int8` keys and values are codes of 8 bits, with a scale for each token and head.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    int8: bool = False

    def block_shapes(self, block_size: int) -> Mapping[str, tuple[int, ...]]:
        """Shape [Hkv, block_size, D] of each tensor of one block in one layer, by name; of scales
        [Hkv, block_size]."""
        dims = {"key": self.key_dim}
        if not self.value_in_key:
            dims["value"] = self.value_dim
        shapes: dict[str, tuple[int, ...]] = {
            name: (self.num_kv_heads, block_size, dim) for name, dim in dims.items()
        }
        if self.int8:
            shapes |= {f"{name}_scale": (self.num_kv_heads, block_size) for name in dims}
        return shapes

    def dtype(self, name: str, element: str) -> str:
        """The dtype of a tensor of a block; `element` is that of a cache without codes."""
        return CODES[name] if self.int8 else element

    def block_values(self, block_size: int) -> int:
        """Number of cached values in one block of one layer; `block_size` 1 gives one token."""
        return sum(map(prod, self.block_shapes(block_size).values()))

    def block_bytes(self, block_size: int, value_bytes: int) -> int:
        """Bytes of one block in one layer, with `value_bytes` bytes per value that is not coded."""
        if not self.int8:
            return self.block_values(block_size) * value_bytes
        shapes = self.block_shapes(block_size)
        return sum(prod(shape) * DTYPE_BYTES.get(CODES[name], 1) for name, shape in shapes.items())


def cache_spec(config: ModelConfig, kv_dtype: str = "auto") -> CacheSpec:
    """The spec of every layer of this model. Any `kv_dtype` but "int8" has values in one piece.

    Raises:
        UnsupportedFeatureError: "int8" with MLA, or heads that are no multiple of 4.
    """
    int8 = kv_dtype == "int8"
    if int8 and (config.mla or config.head_dim % 4):
        what = "MLA" if config.mla else f"heads of {config.head_dim} dimensions, no multiple of 4"
        raise UnsupportedFeatureError(
            f"kv_cache_dtype='int8' does not support {what}, as {config.family} has here; use "
            "kv_cache_dtype='auto'."
        )
    if config.mla:
        rank = config.mla.kv_lora_rank
        return CacheSpec(1, rank + config.mla.qk_rope_head_dim, rank, value_in_key=True)
    return CacheSpec(config.num_kv_heads, config.head_dim, config.head_dim, int8=int8)
