"""e10.2 another way: keys in the outer loop, as in the first version of FlashAttention.

Each block of keys is taken once and used for the rows that may see it, which are consecutive.
Between two visits, each row keeps a finished output and its log-sum-exp, and the output of a tile
is mixed in with its weight.
"""

import torch
from torch import Tensor


def tile(
    queries: Tensor, keys: Tensor, values: Tensor, distance: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one tile; `distance` is position of row minus position of key."""
    scores = torch.where((distance >= 0) & (distance < window), queries @ keys.T, -torch.inf)
    top = scores.max(dim=1).values.clamp(min=-1e300)  # a finite stand-in for minus infinity
    weights = torch.exp(scores - top[:, None])
    total = weights.sum(dim=1)
    output = weights @ values / total.clamp(min=1e-300)[:, None]
    return output, torch.where(total > 0, top + total.log(), -torch.inf)


def tiled_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    block_q: int,
    block_k: int,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """[T, D], [S, D], [S, Dv] -> outputs [T, Dv] and log-sum-exp [T]."""
    count, length = queries.shape[0], keys.shape[0]
    window = count + length if window is None else window
    outputs = torch.zeros(count, values.shape[1], dtype=values.dtype)
    known = torch.full((count,), -torch.inf, dtype=values.dtype)
    for k0 in range(0, length, block_k):
        k1 = min(k0 + block_k, length)
        # Row i stands at i + length - count: the first that sees k0, and the last that sees k1 - 1.
        lowest, highest = k0 + count - length, k1 - 1 + window - 1 + count - length
        for q0 in range(0, count, block_q):
            q1 = min(q0 + block_q, count)
            if q1 - 1 < lowest or q0 > highest:
                continue
            i, j = torch.arange(q0, q1), torch.arange(k0, k1)
            distance = (i + length - count)[:, None] - j
            query = queries[q0:q1] / queries.shape[1] ** 0.5
            output, weight = tile(query, keys[k0:k1], values[k0:k1], distance, window)
            both = torch.maximum(known[q0:q1], weight).clamp(min=-1e300)
            old, new = (known[q0:q1] - both).exp(), (weight - both).exp()
            share = (new / (old + new).clamp(min=1e-300))[:, None]
            outputs[q0:q1] += share * (output - outputs[q0:q1])
            known[q0:q1] = torch.where(old + new > 0, both + (old + new).log(), -torch.inf)
    return outputs, known
