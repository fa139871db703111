"""The cache needs four lines; the mask is where most mistakes are made.

The queries of a piece are the *last* T of L positions. So the mask is a triangle whose corner is at
the lower right. `is_causal=True` of torch's attention has its corner at the upper left, and is
right only if no token was cached before. For one query nothing has to be hidden. So a cache without
any mask writes correct text token by token, until it gets a prompt or a piece of several tokens.

Two more points. The positions of a head are contiguous in memory ([.., S, D], not [S, .., D]), so a
step reads one stretch per head. And the query heads that share a key-value head become one more
dimension of the queries, so keys and values are never repeated.
"""

import torch
from torch import Tensor


class KVCache:
    """The keys and values of several requests in one layer; each request has its own row."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory, in which no token is stored yet."""
        self.keys, self.values = keys, values  # [B, Hkv, S, D]
        self.lengths = [0] * keys.shape[0]

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens of a request; ValueError, and no change, if they do not fit."""
        start, slots = self.lengths[row], self.keys.shape[2]
        end = start + keys.shape[0]
        if end > slots:
            raise ValueError(f"Row {row} holds {start} of {slots} tokens; {len(keys)} do not fit.")
        self.keys[row, :, start:end] = keys.transpose(0, 1)
        self.values[row, :, start:end] = values.transpose(0, 1)
        self.lengths[row] = end

    def attend(self, row: int, queries: Tensor) -> Tensor:
        """Return causal attention for the queries [T, H, D] of the last T tokens -> [T, H, D]."""
        length = self.lengths[row]
        keys, values = self.keys[row, :, :length], self.values[row, :, :length]  # [Hkv, L, D]
        count, heads, dim = queries.shape
        grouped = queries.reshape(count, keys.shape[0], -1, dim)  # [T, Hkv, G, D]
        scores = torch.einsum("tkgd,kld->tkgl", grouped, keys) / dim**0.5
        position = torch.arange(length - count, length)  # [T], of the queries
        future = torch.arange(length) > position[:, None]  # [T, L]
        weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(-1)
        return torch.einsum("tkgl,kld->tkgd", weights, values).reshape(count, heads, dim)
