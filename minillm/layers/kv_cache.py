"""The KV cache tensors. The scheduler counts blocks; only this file knows what one looks like.

A layer sees two calls, `write` and `attend`, so that another device, page layout, precision, or
the trainer, can bring its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minillm import ops
from minillm.config import ModelConfig
from minillm.layers.batch import Batch
from minillm.ops.c_library import use_large_pages


@dataclass(frozen=True)
class CacheSpec:
    """What one token costs in one layer.

    With MLA there is one KV head whose value is a prefix of its key: `value_dim` values of the
    `key_dim` cached ones, stored once.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of one token in one layer."""
        values = self.key_dim + (0 if self.value_in_key else self.value_dim)
        return self.num_kv_heads * values * dtype.itemsize


def cache_spec(config: ModelConfig) -> CacheSpec:
    """The cache that every layer of this model needs."""
    if config.mla:
        rank = config.mla.kv_lora_rank
        return CacheSpec(1, rank + config.mla.qk_rope_head_dim, rank, value_in_key=True)
    return CacheSpec(config.num_kv_heads, config.head_dim, config.head_dim)


class AttentionBackend(Protocol):
    """What a layer needs to know of the past."""

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Store key [N, Hkv, Dk] and value [N, Hkv, Dv] at the batch's slots."""
        ...

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention of query [N, H, Dk] over its sequences -> [N, H, Dv]."""
        ...


# The arguments of `ops.paged_attention`.
AttentionOp = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None, int | None],
    Tensor,
]


class KVCache:
    """Paged keys and values of all layers, head-major: [blocks, Hkv, block_size, D] per layer.

    A head's positions lie side by side because a CPU reads them 7 times faster so than
    token-major. A block may be as long as a whole sequence: then the cache is contiguous.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        attention: AttentionOp | None = None,
        plain_torch: bool = False,
    ):
        self.spec = spec
        usual = ops.plain_attention if plain_torch else ops.paged_attention
        self.attention = attention or usual
        self.is_usual = self.attention is ops.paged_attention
        self.num_blocks, self.block_size = num_blocks, block_size
        shape = (num_layers, num_blocks, spec.num_kv_heads, block_size)
        self.key = torch.empty(*shape, spec.key_dim, dtype=dtype, device=device)
        if spec.value_in_key:
            self.value = self.key[..., : spec.value_dim]
        else:
            self.value = torch.empty(*shape, spec.value_dim, dtype=dtype, device=device)
        if self.key.device.type == "cpu":  # each address is looked up: a tenth of attention's time
            for pages in (self.key, self.value):
                use_large_pages(pages.data_ptr(), pages.nbytes)
        # Whether writing is a kernel here, and whether norm and rotation are part of its launch.
        self.by_kernel = ops.uses_kernels(self.key)
        self.fuses = not plain_torch and ops.fuses_projections(self.key)

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Store key [N, Hkv, Dk] and value [N, Hkv, Dv] (None with MLA) at the batch's slots."""
        if self.by_kernel:
            slots = batch.slot_mapping
            return ops.write_cache(key, value, self.key[layer], self.value[layer], slots)
        count = len(batch.slot_mapping)
        if count < len(key):  # what is behind is padding
            key, value = key[:count], value if value is None else value[:count]
        blocks = batch.slot_mapping // self.block_size
        offsets = batch.slot_mapping % self.block_size
        self.key[layer][blocks, :, offsets] = key
        if value is not None:
            self.value[layer][blocks, :, offsets] = value

    def write_qkv(
        self,
        layer: int,
        qkv: Tensor,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        rope: tuple[Tensor, Tensor],
        interleaved: bool,
        batch: Batch,
    ) -> Tensor:
        """Norm, rotate and store a product [N, H + 2 Hkv, D] -> query [N, H, D]."""
        q_weight, k_weight = norms or (None, None)
        cos, sin = rope
        return ops.norm_rope_write(
            qkv,
            q_weight,
            k_weight,
            eps,
            cos,
            sin,
            interleaved,
            self.key[layer],
            self.value[layer],
            batch.slot_mapping,
        )

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention of query [N, H, Dk] over its sequences -> [N, H, Dv]."""
        return self.attention(
            query,
            self.key[layer],
            self.value[layer],
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            scale,
            window,
            batch.max_query_len,
        )

    @property
    def num_bytes(self) -> int:
        """Memory that the cache takes."""
        value = 0 if self.spec.value_in_key else self.value.nbytes
        return self.key.nbytes + value

    def copy_blocks(self, copies: Sequence[tuple[int, int]], target: "KVCache") -> None:
        """Copy (source block, target block) of every layer, here or to a cache on another device.

        All sources are read before any target is written.
        """
        sources, targets = (list(blocks) for blocks in zip(*copies, strict=True))
        pairs = [(self.key, target.key)]
        if not self.spec.value_in_key:
            pairs.append((self.value, target.value))
        for mine, theirs in pairs:
            theirs[:, targets] = mine[:, sources].to(theirs.device)
