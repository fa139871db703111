"""The seam for rules that decide on drafts otherwise than by comparing them with samples.

    sampled       s1   s2   s3   s4  s5       one token at each position, as in plain decoding
    a rule says   d1   d2   r    s4' s5       at drafted positions: the draft, or another token
    match keeps   d1   d2   r                 up to the first that is not the draft (`verify.py`)

So a rule is a function of one position, and all else is as in plain decoding: the last position
has no draft and keeps its sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from minillm.ops.philox import WORD, Purpose, philox
from minillm.ops.sampling import Pack


class DraftedToken(NamedTuple):
    """A draft at the position of one sample.

    Attributes:
        token: the drafted token id.
        step: how many drafts of its sequence come before it.
        law: [V], the probabilities that it was drawn from; None if it was not drawn, or with the
            noise of the target.
    """

    token: int
    step: int
    law: Tensor | None


class Rule(Protocol):
    """Decides on drafts. `Sampler.rule` holds one; without it samples stay as they are."""

    def choose(
        self,
        samples: Tensor,
        logits: Tensor,
        pack: Pack,
        drafted: Sequence[DraftedToken],
        model_dtype: torch.dtype,
    ) -> Tensor:
        """Tokens for K drafted positions.

        Args:
            samples: int64 [K], what plain decoding samples there; not changed.
            logits: [K, V] with their edits; not changed.
            pack: how the K positions draw.
            drafted: the K drafts.
            model_dtype: of the model; edited logits are float32.

        Returns:
            int64 [K]; the draft where it is accepted. A token depends on its position alone.
        """
        ...


def drafts_at(
    rows: Sequence[int], drafts: Mapping[int, Sequence[int]], laws: Mapping[int, Tensor | None]
) -> Iterator[DraftedToken | None]:
    """For each of the logits of `rows` the draft at its position; None where there is none.

    Args:
        rows: a row stands as often as it has logits, side by side: once more than it has drafts.
        drafts: of rows that have some.
        laws: of these rows, [at least as many as drafts, V] or None.
    """
    last, step = None, 0
    for row in rows:
        last, step = row, (step + 1 if row == last else 0)
        tokens, law = drafts.get(row, ()), laws.get(row)
        if step < len(tokens):
            yield DraftedToken(tokens[step], step, None if law is None else law[step])
        else:
            yield None


def coins(pack: Pack, *purposes: Purpose) -> Tensor:
    """Uniform numbers for each of K positions, float64 [purposes, K]: ``(word + 1/2) / 2^32``.

    They are never 0 or 1, which float32 would round the largest ones to: so ``coin < probability``
    is certain for 1 and impossible for 0.
    """
    key = pack.seed & WORD, pack.seed >> 32 & WORD
    purpose = torch.tensor(purposes).to(pack.seed.device)[:, None]
    item = torch.zeros_like(purpose)
    counter = item, pack.position & WORD, pack.sample_index & WORD, purpose
    return (philox(key, counter)[0].double() + 0.5) * 2.0**-32
