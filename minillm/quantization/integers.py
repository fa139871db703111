"""The order of small integers inside bytes and 32-bit words.

Checkpoint formats pack eight 4-bit codes into an int32 or two into a byte, each in its own order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ: nibble k of a word holds column AWQ_NIBBLES[k]


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """int32 [.., n] -> uint8 [.., n x 32 / bits], the code in the lowest bits first.

    `order[j]` is the position in the word of value j; by default j.
    """
    count = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    if order is not None:
        shifts = shifts[torch.tensor(order, device=words.device)]
    codes = (words[..., None] >> shifts) & ((1 << bits) - 1)
    return codes.to(torch.uint8).reshape(*words.shape[:-1], words.shape[-1] * count)


def split_bytes(packed: Tensor) -> Tensor:
    """uint8 [.., n] -> uint8 [.., 2 n]: the low half of a byte, then the high half."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def joined(codes: Tensor) -> Tensor:
    """The inverse of `split_bytes`: codes 0 to 15 [.., 2 n] -> uint8 [.., n]."""
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)
