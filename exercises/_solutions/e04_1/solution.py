"""The group is one more dimension of the queries.

Reshape [T, H, Dk] to [T, Hkv, G, Dk] and nothing needs to be repeated: the G query heads of a
group become G rows of one matrix that is multiplied with that group's keys. That is also why
sharing pays. With a key head per query head, a step of decoding multiplies a vector with the keys,
two operations for each number that was read. With G rows each number that was read is used G times.

What looks lean need not be: `queries[:, :, :, None] @ keys.mT` broadcasts the keys over the group,
and torch.matmul writes down what it broadcasts before it multiplies. Result and speed on a small
example say nothing about it; the number of elements does.
"""

import torch
from torch import Tensor


def grouped_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[T, H, Dk], [S, Hkv, Dk], [S, Hkv, Dv] -> [T, H, Dv], causal, the last T of S positions."""
    tokens, heads, key_dim = queries.shape
    length, kv_heads, dim = values.shape
    grouped = queries.view(tokens, kv_heads, -1, key_dim)  # [T, Hkv, G, Dk]
    scores = torch.einsum("tkgd,skd->tkgs", grouped, keys) / key_dim**0.5
    position = torch.arange(length - tokens, length)  # [T], of the queries
    future = torch.arange(length) > position[:, None]  # [T, S]
    weights = scores.masked_fill(future[:, None, None], -torch.inf).softmax(-1)
    out = torch.einsum("tkgs,skd->tkgd", weights, values)  # [T, Hkv, G, Dv]
    return out.reshape(tokens, heads, dim)
