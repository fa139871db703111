"""The keys in the ring are out of order, and this needs no correction.

Attention is a sum over a *set* of keys, so their order in memory does not matter. Their positions
are contained in the keys, as a rotation, and a dot product of two rotated vectors depends only on
the distance of their positions. So a key is rotated once, by its position in the text, and never
changed again; its slot does not matter. Rotating by the slot works until the ring has gone round
once, and then puts the newest token before the oldest.

A prompt longer than the ring would write some slots twice in one assignment, and torch does not
define which of the two writes wins. So cut it first.
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
    """The keys and values of the latest W tokens of one request in one layer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """Use this memory, in which no token is stored yet."""
        self.keys, self.values = keys, values  # [Hkv, W, D]
        self.seen = 0

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Store the next T tokens, keys (not yet rotated) and values [T, Hkv, D], T at least 1."""
        window = self.keys.shape[1]
        positions = torch.arange(self.seen, self.seen + keys.shape[0])[-window:]
        slots = positions % window
        self.keys[:, slots] = rotate(keys[-window:], positions).transpose(0, 1)
        self.values[:, slots] = values[-window:].transpose(0, 1)
        self.seen += keys.shape[0]

    def attend(self, query: Tensor) -> Tensor:
        """Return attention for the query [H, D] (not yet rotated) of the newest token."""
        held = min(self.seen, self.keys.shape[1])
        keys, values = self.keys[:, :held], self.values[:, :held]  # [Hkv, L, D]
        newest = torch.tensor([self.seen - 1])
        rotated = rotate(query[None], newest)[0].reshape(keys.shape[0], -1, keys.shape[2])
        scores = rotated @ keys.transpose(1, 2) / keys.shape[2] ** 0.5  # [Hkv, G, L]
        return (scores.softmax(-1) @ values).reshape(query.shape)
