"""e04.1 another way: one key-value head after the other, with two matrix products each.

The queries of a group are the rows of one matrix [T * G, Dk], so the keys of a head are a view
[S, Dk]. The mask is a lower triangle, shifted right by the number of older positions.
"""

import torch
from torch import Tensor


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[T, H, Dk], [S, Hkv, Dk], [S, Hkv, Dv] -> [T, H, Dv]."""
    tokens, heads, width = queries.shape
    length, shared, _ = keys.shape
    group = heads // shared
    seen = torch.ones(tokens, length, dtype=torch.bool).tril(length - tokens)
    seen = seen.repeat_interleave(group, dim=0)  # [T * G, S]: rows of one query stay together
    answers = []
    for head in range(shared):
        rows = queries[:, head * group : (head + 1) * group].reshape(-1, width) * width**-0.5
        power = torch.where(seen, rows @ keys[:, head].T, -torch.inf)
        power = torch.exp(power - power.amax(1, keepdim=True))
        mixed = power @ values[:, head] / power.sum(1, keepdim=True)  # [T * G, Dv]
        answers.append(mixed.view(tokens, group, -1))
    return torch.cat(answers, dim=1)
