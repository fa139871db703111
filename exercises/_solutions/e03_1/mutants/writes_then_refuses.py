"""You write what fits and refuse the rest: a refused piece must leave every slot as it was."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of several requests in one layer, each request in a row of its own."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory; nothing is in it yet."""
        self.keys, self.values = keys, values  # [B, Hkv, S, D]
        self.lengths = [0] * keys.shape[0]

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens of a request; ValueError, and no change, if they do not fit."""
        start, slots = self.lengths[row], self.keys.shape[2]
        end = start + keys.shape[0]
        if end > slots:
            self.keys[row, :, start:] = keys[: slots - start].transpose(0, 1)
            self.values[row, :, start:] = values[: slots - start].transpose(0, 1)
            raise ValueError(f"Row {row} holds {start} of {slots} tokens; {len(keys)} do not fit.")
        self.keys[row, :, start:end] = keys.transpose(0, 1)
        self.values[row, :, start:end] = values.transpose(0, 1)
        self.lengths[row] = end

    def attend(self, row: int, queries: Tensor) -> Tensor:
        """Causal attention of the queries [T, H, D] of the last T stored tokens -> [T, H, D]."""
        length = self.lengths[row]
        keys, values = self.keys[row, :, :length], self.values[row, :, :length]  # [Hkv, L, D]
        count, heads, dim = queries.shape
        grouped = queries.reshape(count, keys.shape[0], -1, dim)  # [T, Hkv, G, D]
        scores = torch.einsum("tkgd,kld->tkgl", grouped, keys) / dim**0.5
        position = torch.arange(length - count, length)  # [T], of the queries
        future = torch.arange(length) > position[:, None]  # [T, L]
        weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("tkgl,kld->tkgd", weights, values).reshape(count, heads, dim)
