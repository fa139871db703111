"""e03.2 another way: for each slot, find the token that belongs there.

With n tokens so far, slot s has to hold position n - 1 - (n - 1 - s) % W, or nothing if that is
negative. This needs no special case for short texts, for long prompts, or for the end of the ring.
"""

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
        self.keys, self.values = keys, values
        self.count = 0

    def positions(self) -> Tensor:
        """The position that each slot holds [W], negative for a slot that holds nothing."""
        window = self.keys.shape[1]
        newest = self.count - 1
        return newest - (newest - torch.arange(window)) % window

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens, keys (not yet rotated) and values [T, Hkv, D], T at least 1."""
        before = self.count
        self.count += len(keys)
        token = self.positions() - before  # which of the T tokens each slot asks for
        asks = (token >= 0).nonzero().flatten()  # the others keep what they have
        token = token[asks]
        self.keys[:, asks] = rotate(keys[token], token + before).movedim(0, 1)
        self.values[:, asks] = values[token].movedim(0, 1)

    def attend(self, query: Tensor) -> Tensor:
        """Return attention for the query [H, D] (not yet rotated) of the newest token."""
        used = self.positions() >= 0
        keys, values = self.keys[:, used], self.values[:, used]  # [Hkv, n, D], in slot order
        query = rotate(query[None], torch.tensor([self.count - 1]))[0]
        groups = query.unflatten(0, (len(keys), -1))  # [Hkv, H / Hkv, D]
        scores = torch.einsum("hgd,hnd->hgn", groups, keys) / query.shape[-1] ** 0.5
        return torch.einsum("hgn,hnd->hgd", scores.softmax(dim=-1), values).flatten(0, 1)
