"""e03.1 another way: no score matrix and no mask.

`attend` goes through the stored tokens, oldest first, and keeps per query a running maximum, a sum
of weights and a weighted sum of values (online softmax). A token is used only for later queries.
"""

import torch
from torch import Tensor


class KVCache:
    """The keys and values of several requests in one layer; each request has its own row.

    The caller provides the memory, filled with NaN: `keys` and `values` are [B, Hkv, S, D].
    Slot p of row b belongs to position p of request b.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory, in which no token is stored yet."""
        self.keys, self.values = keys, values
        self.filled = [0] * keys.shape[0]

    def append(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens of a request: keys and values [T, Hkv, D], T at least 1.

        Raises:
            ValueError: the tokens do not fit; nothing is changed.
        """
        slots = torch.arange(self.filled[row], self.filled[row] + len(keys))
        if slots[-1] >= self.keys.shape[2]:
            raise ValueError(f"row {row} holds {self.filled[row]}, no room for {len(keys)} more")
        self.keys[row].index_copy_(1, slots, keys.transpose(0, 1))
        self.values[row].index_copy_(1, slots, values.transpose(0, 1))
        self.filled[row] += len(keys)

    def attend(self, row: int, queries: Tensor) -> Tensor:
        """Return causal attention for the queries [T, H, D] of the last T tokens -> [T, H, D]."""
        tokens, heads, width = queries.shape
        group = heads // self.keys.shape[1]
        first = self.filled[row] - tokens  # the position of queries[0]
        top = torch.full((tokens, heads, 1), -torch.inf)  # the largest score so far
        weight = torch.zeros(tokens, heads, 1)
        total = torch.zeros(tokens, heads, width)
        for slot in range(self.filled[row]):
            seers = slice(max(slot - first, 0), tokens)  # the queries at this position or later
            key = self.keys[row, :, slot].repeat_interleave(group, dim=0)  # [H, D]
            value = self.values[row, :, slot].repeat_interleave(group, dim=0)
            score = (queries[seers] * key).sum(-1, keepdim=True) / width**0.5
            higher = torch.maximum(top[seers], score)
            fade, new = (top[seers] - higher).exp(), (score - higher).exp()
            weight[seers] = weight[seers] * fade + new
            total[seers] = total[seers] * fade + new * value
            top[seers] = higher
        return total / weight
