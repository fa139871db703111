"""e03.2: a cache that remembers a window, in a ring. The task is in README.md."""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of x [T, heads, D] whose tokens stand at `positions` [T]. Given: use it."""
    half = x.shape[-1] // 2
    speed = 100.0 ** (-torch.arange(half) / half)  # [D / 2], radians per position
    angle = positions[:, None, None] * speed  # [T, 1, D / 2]
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()),
        dim=-1,
    )


class RingCache:
    """Keys and values of the latest W tokens of one request in one layer.

    The memory is given, filled with NaN: `keys` and `values` are [Hkv, W, D], and position p
    lives in slot p % W.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory; nothing is in it yet."""
        raise NotImplementedError("TODO e03.2: keep the memory, and how many tokens came")

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens, keys (not yet rotated) and values [T, Hkv, D], T at least 1."""
        raise NotImplementedError("TODO e03.2: rotate the keys, and find a slot for each token")

    def attend(self, query: Tensor) -> Tensor:
        """Attention of the newest token's query [H, D], not yet rotated, over what is kept."""
        raise NotImplementedError("TODO e03.2: rotate the query, attend to the slots in use")
