"""Batched greedy generation, for the distillation text of a draft model."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from minillm.config import ModelConfig
from minillm.lab.training.trainer import rows_batch
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch


class RowCache:
    """A contiguous KV cache for rows of equal length, [B, Hkv, S, D] per layer; no gradient.

    A step adds the same number of tokens to every row; call `advance` after all layers wrote.
    """

    def __init__(self, config: ModelConfig, num_rows: int, length: int, dtype: torch.dtype):
        self.num_rows, self.filled = num_rows, 0
        shape = (config.num_layers, num_rows, config.num_kv_heads, length, config.head_dim)
        self.key, self.value = torch.empty(shape, dtype=dtype), torch.empty(shape, dtype=dtype)

    def write(self, layer: int, key: Tensor, value: Tensor | None, batch: Batch) -> None:
        """Append key and value [N, Hkv, D], N / B tokens per row."""
        for cache, new in ((self.key, key), (self.value, value)):
            if new is not None:
                rows = new.view(self.num_rows, -1, *new.shape[1:]).transpose(1, 2)
                cache[layer, :, :, self.filled : self.filled + rows.shape[2]] = rows

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention of query [N, H, D] over its row so far -> [N, H, D]."""
        q = query.view(self.num_rows, -1, *query.shape[1:]).transpose(1, 2)  # [B, H, T, D]
        end = self.filled + q.shape[2]
        k, v = self.key[layer, :, :, :end], self.value[layer, :, :, :end]
        if q.shape[2] == 1:  # treat the heads of a group as queries: K and V are read once
            q = q.view(self.num_rows, k.shape[1], -1, q.shape[-1])
            out = F.scaled_dot_product_attention(q, k, v, scale=scale)
            return out.reshape(query.shape)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out.transpose(1, 2).reshape(query.shape)

    def advance(self, tokens: int) -> None:
        """Advance the length of every row by `tokens`."""
        self.filled += tokens


@torch.no_grad()
def greedy_rows(model: Decoder, prompts: Tensor, new_tokens: int) -> Tensor:
    """Continue every row of `prompts` [B, T] greedily -> [B, T + new_tokens]."""
    num_rows, length = prompts.shape
    cache = RowCache(model.config, num_rows, length + new_tokens, model.dtype)
    rows, fresh = [prompts], prompts
    for _ in range(new_tokens):
        batch = rows_batch(fresh.flatten(), fresh.shape[1], first_position=cache.filled)
        hidden = model(batch, cache).view(num_rows, fresh.shape[1], -1)[:, -1]
        cache.advance(fresh.shape[1])
        fresh = model.logits(hidden).argmax(-1, keepdim=True)
        rows.append(fresh)
    return torch.cat(rows, dim=1)


def own_text(
    model: Decoder,
    stream: np.ndarray,
    batch_numbers: Sequence[int],
    prompt_length: int = 64,
    new_tokens: int = 128,
    num_rows: int = 256,
) -> np.ndarray:
    """Prompts from `stream`, each with its greedy continuation: [batches, tokens] uint16.

    A batch depends only on its number, so that several processes can share the work.
    """
    batches = []
    for number in tqdm(batch_numbers, desc="Generating", unit="batch"):
        generator = np.random.default_rng(number)
        starts = generator.integers(len(stream) - prompt_length, size=num_rows)
        prompts = np.stack([stream[start : start + prompt_length] for start in starts])
        rows = greedy_rows(model, torch.from_numpy(prompts.astype(np.int64)), new_tokens)
        batches.append(rows.flatten().numpy().astype(np.uint16))
    return np.stack(batches)
