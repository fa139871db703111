"""Counter-based random numbers: a function of seed, sample, position and token, without state.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key
and a counter into four 32-bit words with ten rounds of multiply and xor. A request draws the same
noise alone, in any batch row, after preemption, and on every device.

The mapping is part of the interface, because kernels draw the same words::

    key     = (seed & 0xffffffff, (seed >> 32) & 0xffffffff)     seed: 64 bits
    counter = (item // 4, position, sample_index, purpose)
    word    = philox(key, counter)[item % 4]

`item` is the token id if every token needs its own noise, else 0. In Triton the four words are
``tl.philox(seed, item // 4, position, sample_index, purpose)``.

Words and uniforms are exact on every device. Logarithms differ in the last bit between math
libraries, and between the vector body and the scalar tail of a loop. Gumbel noise is therefore
computed in float64 and rounded to float32, which hides the difference in all but about one in 10^8
values.
"""

from enum import IntEnum

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, from the paper
ROUNDS = 10


class Purpose(IntEnum):
    """The purpose of a draw; different purposes have independent noise."""

    SAMPLE = 0  # sampling a token of the target model
    DRAFT = 1  # sampling a token of the draft model
    ACCEPT = 2  # accepting a draft
    RESAMPLE = 3  # sampling from the residual distribution after a rejection


def philox(key: tuple[Tensor, Tensor], counter: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words per counter.

    Args:
        key: two int64 tensors with values below 2^32.
        counter: four int64 tensors with values below 2^32; all six broadcast together.

    Returns:
        Four int64 tensors with values below 2^32.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        # int64 products wrap; the mask after the arithmetic shift leaves the true high word.
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD
        c2, c3 = (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def random_words(
    seed: Tensor, sample_index: Tensor, position: Tensor, purpose: Purpose, items: Tensor
) -> Tensor:
    """One 32-bit word per item, for items chosen row by row.

    Args:
        seed, sample_index, position: int64 [K], one per row; seeds use all 64 bits.
        items: int64 [K, M] (or [M], the same for all rows), at least 0, below 2^34.

    Returns:
        int64 [K, M] with values below 2^32.
    """
    seed, sample_index, position = seed[:, None], sample_index[:, None], position[:, None]
    counter = (items >> 2, position & WORD, sample_index & WORD, torch.full_like(seed, purpose))
    words = torch.stack(philox((seed & WORD, seed >> 32 & WORD), counter))  # [4, K, M]
    lanes = (items & 3).expand(words.shape[1:])
    return words.gather(0, lanes[None])[0]


def random_words_of_vocabulary(
    seed: Tensor, sample_index: Tensor, position: Tensor, purpose: Purpose, vocab_size: int
) -> Tensor:
    """`random_words` for the items 0 .. vocab_size - 1 of every row, using each block whole.

    Returns:
        int64 [K, vocab_size] with values below 2^32.
    """
    seed, sample_index, position = seed[:, None], sample_index[:, None], position[:, None]
    blocks = torch.arange((vocab_size + 3) // 4, device=seed.device)[None]
    counter = (blocks, position & WORD, sample_index & WORD, torch.full_like(seed, purpose))
    words = torch.stack(philox((seed & WORD, seed >> 32 & WORD), counter), dim=-1)  # [K, V/4, 4]
    return words.flatten(1)[:, :vocab_size]


def to_uniform(words: Tensor) -> Tensor:
    """float32 in the open interval (0, 1): ``min((float32(word) + 1/2) / 2^32, 1 - 2^-24)``.

    The resolution near 0 is 2^-32, as `to_gumbel` needs. Values are never 0 or 1, so no logarithm
    is infinite, and ``uniform < probability`` is always true for 1 and never for 0.
    """
    return ((words.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)


def to_gumbel(words: Tensor) -> Tensor:
    """Standard Gumbel noise, float32: ``-log(-log(1 - u))``, between -2.9 and 22.9.

    ``argmax(logits + noise)`` is a sample of ``softmax(logits)`` (Gumbel, 1954). The uniform is
    mirrored to ``1 - u``, because large noise comes from arguments near 1, where float32 has steps
    of 2^-24: with 150,000 tokens these would produce ties, which favour small token ids.
    """
    return to_uniform(words).double().neg_().log1p_().neg_().log_().neg_().float()
