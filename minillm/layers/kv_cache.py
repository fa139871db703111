"""The KV cache tensors. The scheduler only counts blocks; this file defines their layout.

Layers call `write` and `attend`, the protocol `AttentionBackend`. The deterministic mode and the
trainer have other implementations.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from minillm import ops
from minillm.cache.spec import CacheSpec
from minillm.ops.batch import AttentionMode, Batch, Pages, Prologue
from minillm.ops.c_library import use_large_pages


class AttentionBackend(Protocol):
    """How attention layers access cached keys and values."""

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Store key [N, Hkv, Dk] and value [N, Hkv, Dv] (None with MLA) at the batch's slots."""

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention of query [N, H, Dk] over its sequences -> [N, H, Dv]."""


class KVCache(AttentionBackend):
    """Paged keys and values of all layers, head-major: [blocks, Hkv, block_size, D] per layer.

    The positions of a head are adjacent, because a CPU reads this layout 7 times as fast as a
    token-major one. A block may be as long as a whole sequence: then the cache is contiguous. With
    `swap_space_of` the cache is host memory for that device, in which all layers of a block are
    contiguous, so one copy moves them. For a GPU it is pinned, and copies are asynchronous. The
    tensors of a block, for example scales of codes of 8 bits, are those that the spec names.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        mode: AttentionMode = "fast",
        swap_space_of: torch.device | None = None,
    ):
        self.spec, self.mode, self.dtype = spec, mode, dtype
        self.num_blocks, self.block_size = num_blocks, block_size
        self.is_swap_space = swap_space_of is not None

        def pages(name: str, shape: tuple[int, ...]) -> Tensor:
            kind = getattr(torch, spec.dtype(name, str(dtype).removeprefix("torch.")))
            if swap_space_of is None:
                return torch.empty(num_layers, num_blocks, *shape, dtype=kind, device=device)
            pinned = swap_space_of.type != "cpu"
            whole = (num_blocks, num_layers, *shape)
            return torch.empty(whole, dtype=kind, pin_memory=pinned).transpose(0, 1)

        shapes = spec.block_shapes(block_size)
        tensors = {name: pages(name, shape) for name, shape in shapes.items()}
        self.tensors, self.key = tuple(tensors.values()), tensors["key"]
        self.value = tensors.get("value", self.key[..., : spec.value_dim])
        if self.key.device.type == "cpu":  # address translation takes a tenth of attention's time
            for tensor in self.tensors:
                use_large_pages(tensor.data_ptr(), tensor.nbytes)
        layers = self.key, self.value, *(tensors[name] for name in shapes if "scale" in name)
        self.pages = [Pages(*tensors) for tensors in zip(*layers, strict=True)]

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        ops.write_cache(key, value, self.pages[layer], batch.slot_mapping)

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        return ops.paged_attention(query, self.pages[layer], batch, scale, window, self.mode)

    @property
    def num_bytes(self) -> int:
        """Memory that the cache takes."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def copy_blocks(self, copies: Sequence[tuple[int, int]], target: "KVCache") -> None:
        """Copy (source block, target block) of every layer, within this cache or between it and
        its swap space.

        All sources are read before any target is written. The host does not wait: on a GPU the
        indices are uploaded in one copy from pinned memory, and all copies run in stream order.
        """
        device = target.key.device if self.is_swap_space else self.key.device
        index = torch.tensor(copies, dtype=torch.int64).T  # [2, n]
        if device.type != "cpu":
            index = index.contiguous().pin_memory().to(device, non_blocking=True)
        for mine, theirs in zip(self.tensors, target.tensors, strict=True):
            if self.is_swap_space:
                moved = theirs.new_empty(len(copies), *theirs[:, 0].shape).transpose(0, 1)
                for place, (block, _) in enumerate(copies):
                    moved[:, place].copy_(mine[:, block], non_blocking=True)
            else:
                moved = mine.index_select(1, index[0])  # [layers, n, Hkv, block_size, D]
            if not target.is_swap_space:
                theirs.index_copy_(1, index[1], moved)
                continue
            for (_, block), whole in zip(copies, moved.transpose(0, 1).contiguous(), strict=True):
                theirs[:, block].copy_(whole, non_blocking=True)


def write_qkv(
    kv: AttentionBackend,
    layer: int,
    qkv: Tensor,
    prologue: Prologue,
    rope: tuple[Tensor, Tensor],
    batch: Batch,
) -> Tensor:
    """Apply QK norm and RoPE to `qkv` [N, H + 2 Hkv, D], store keys and values -> query [N, H, D].

    With a `KVCache` this is one fused operation.
    """
    if isinstance(kv, KVCache):
        pages = kv.pages[layer]
        return ops.norm_rope_write(qkv, prologue, rope, pages, batch.slot_mapping, kv.mode)
    q, k, v = ops.norm_rope(qkv, prologue, rope)
    kv.write(layer, k, v, batch)
    return q
