"""The attention backend of training: whole rows, differentiable, without a KV cache."""

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.ops.batch import Batch

BLOCK = 256  # queries per block: on a CPU 3.4 times as fast as SDPA, including backward
MAX_BLOCKS = 4  # more blocks save few products and compile slowly


class CausalRows:
    """Causal attention over a batch whose sequences all have `window` tokens.

    Uses plain matrix products over blocks of queries, because torch's fused CPU kernel reaches a
    fifth of their rate in bf16. Keys after a block's last query are skipped. With MLA, the first
    `latent_size` numbers of a key are also its value.
    """

    def __init__(self, window: int, latent_size: int | None = None):
        self.window, self.latent_size = window, latent_size
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Keep key [N, Hkv, Dk] and value [N, Hkv, Dv] for the following `attend`."""
        self.key = key
        self.value = key[..., : self.latent_size] if value is None else value

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Attention of query [N, H, Dk] within each row of `window` tokens -> [N, H, Dv]."""
        if self.key is None or self.value is None:
            raise RuntimeError("attend() was called before write().")
        kind = query.device.type
        # Under autocast, a norm or a rotation may have widened any of the three.
        narrow = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if narrow else self.value.dtype
        q, k, v = (self._rows(x.to(dtype)) for x in (query, self.key, self.value))  # [B, H, T, D]
        rows, heads, length, _ = q.shape
        kv_heads = k.shape[1]
        block = max(BLOCK, -(-length // MAX_BLOCKS))
        outputs = []
        for start in range(0, length, block):
            end = min(start + block, length)
            count = end - start
            queries = q[:, :, start:end].reshape(rows, kv_heads, -1, q.shape[-1])  # [B,Hkv,G*C,D]
            scores = (queries @ k[:, :, :end].transpose(-1, -2)).float() * scale
            scores = scores.view(rows, kv_heads, -1, count, end) + self._mask(
                start, end, window, q.device
            )
            weights = scores.softmax(-1).to(q.dtype).view(rows, kv_heads, -1, end)
            outputs.append((weights @ v[:, :, :end]).view(rows, heads, count, v.shape[-1]))
        return torch.cat(outputs, dim=2).transpose(1, 2).reshape(-1, heads, v.shape[-1])

    def _rows(self, x: Tensor) -> Tensor:
        """[N, H, D] -> [B, H, T, D]"""
        return x.view(-1, self.window, x.shape[1], x.shape[2]).transpose(1, 2)

    @staticmethod
    def _mask(start: int, end: int, window: int | None, device: torch.device) -> Tensor:
        """Additive mask [C, S]: 0 where key j is visible to query `start + i`, else a large
        negative number."""
        query = torch.arange(start, end, device=device).unsqueeze(1)
        key = torch.arange(end, device=device)
        hidden = key > query
        if window is not None:
            hidden = hidden | (key <= query - window)
        return torch.where(hidden, -1e9, 0.0)


def causal_rows(config: ModelConfig, window: int) -> CausalRows:
    """The backend for a model of `config` over rows of `window` tokens."""
    return CausalRows(window, config.mla.kv_lora_rank if config.mla else None)
