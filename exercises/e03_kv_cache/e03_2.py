"""e03.2: a cache for a sliding window, in a ring. The task is in README.md."""

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply the rotary embedding to x [T, heads, D] of tokens at `positions` [T]. Given: use it."""
    half = x.shape[-1] // 2
    speed = 100.0 ** (-torch.arange(half) / half)  # [D / 2], radians per position
    angle = positions[:, None, None] * speed  # [T, 1, D / 2]
    first, second = x[..., :half], x[..., half:]
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()),
        dim=-1,
    )


class RingCache:
    """The keys and values of the latest W tokens of one request in one layer.

    The caller provides the memory, filled with NaN: `keys` and `values` are [Hkv, W, D].
    Position p is stored in slot p % W.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory, in which no token is stored yet."""
        raise NotImplementedError("TODO e03.2: store the memory and the number of tokens so far")

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens, keys (not yet rotated) and values [T, Hkv, D], T at least 1."""
        raise NotImplementedError("TODO e03.2: rotate the keys, and compute the slot of each token")

    def attend(self, query: Tensor) -> Tensor:
        """Return attention for the query [H, D] (not yet rotated) of the newest token."""
        raise NotImplementedError("TODO e03.2: rotate the query, attend to the slots in use")
