"""The interface of acceptance rules, which replace the comparison of drafts with samples.

    sampled       s1   s2   s3   s4  s5       one token at each position, as in plain decoding
    rule          d1   d2   r    s4' s5       at drafted positions: the draft, or another token
    accepted      d1   d2   r                 up to the first that is not the draft (`verify.py`)

A rule decides each position separately. The last position has no draft and keeps its sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.ops.philox import WORD, Purpose, philox
from minillm.ops.sampling import Pack
from minillm.ops.transfers import indices


class DraftedToken(NamedTuple):
    """A draft at the position of one sample.

    Attributes:
        token: the draft's token id.
        step: number of drafts of its sequence before it.
        dist: [V], the distribution it was drawn from; None if it was not sampled, or sampled with
            the noise of the target.
    """

    token: int
    step: int
    dist: Tensor | None


class Verification(NamedTuple):
    """K drafted positions, read-only.

    Attributes:
        samples: int64 [K], the tokens of plain decoding.
        logits: [K, V] after logits processors.
        pack: sampling parameters of the K positions.
        drafts: the K drafts.
        model_dtype: dtype of the model; edited logits are float32.
    """

    samples: Tensor
    logits: Tensor
    pack: Pack
    drafts: Sequence[DraftedToken]
    model_dtype: torch.dtype


class Rule(Protocol):
    """Decides whether drafts are accepted (`Sampler.rule`). Without a rule, samples are kept."""

    def choose(self, given: Verification) -> Tensor:
        """Tokens for K drafted positions, int64 [K]: the draft if accepted, otherwise another
        token. The other K - 1 positions must not change it."""
        ...


def drafts_at(
    rows: Sequence[int], drafts: Mapping[int, Sequence[int]], dists: Mapping[int, Tensor | None]
) -> Iterator[DraftedToken | None]:
    """The draft at the position of each row of logits, or None.

    Args:
        rows: the row of each logits. A row with k drafts is repeated k + 1 times, adjacent.
        drafts: row -> draft tokens.
        dists: row -> distributions [at least as many as drafts, V], or None.
    """
    last, step = None, 0
    for row in rows:
        last, step = row, (step + 1 if row == last else 0)
        tokens, dist = drafts.get(row, ()), dists.get(row)
        if step < len(tokens):
            yield DraftedToken(tokens[step], step, None if dist is None else dist[step])
        else:
            yield None


def coins(pack: Pack, *purposes: Purpose) -> Tensor:
    """Uniform random numbers for K positions, float64 [purposes, K]: ``(word + 1/2) / 2^32``.

    They are never 0 or 1 (float32 would round the largest to 1), so ``coin < probability`` is
    always true for probability 1 and never for 0.
    """
    key = pack.seed & WORD, pack.seed >> 32 & WORD
    purpose = indices(pack.seed.device, purposes)[:, None]
    item = torch.zeros_like(purpose)
    counter = item, pack.position & WORD, pack.sample_index & WORD, purpose
    return (philox(key, counter)[0].double() + 0.5) * 2.0**-32
