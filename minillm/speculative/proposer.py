"""What proposes drafts: the seam for n-grams, draft models, heads, or an object of a user.

A proposer sees sequences and answers with tokens. It changes how many tokens a step yields, never
which: `verify.py` keeps a draft only where it equals the token that is sampled at its position.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from minillm.scheduling.plan import NewSequence, StepPlan


class DraftRow(NamedTuple):
    """One sequence that may have drafts.

    Attributes:
        new: its parameters, seed and sample index; `new.seq_id` names it until it is forgotten.
        token_ids: its prompt and its tokens so far; not to be changed.
        num_drafts: how many tokens are wanted at most.
        place: its row in the runner's block tables.
    """

    new: NewSequence
    token_ids: Sequence[int]
    num_drafts: int
    place: int


class Draft(NamedTuple):
    """Drafts of one row, with what drew them.

    Attributes:
        token_ids: at most `num_drafts` ids.
        law: float32 [len(token_ids), V], the probabilities that each was drawn from; None if the
            proposer draws nothing, or draws with the noise of the target. Only
            ``rejection_sample_method="standard"`` reads it.
    """

    token_ids: Sequence[int]
    law: Tensor | None = None


class Proposer(Protocol):
    """Guesses what sequences go on with. Only `propose` is needed.

    A proposer with a cache of its own also has ``follow(plan: StepPlan) -> None``, which is called
    before the first row of each step is computed, and one with memory of sequences has
    ``forget(seq_id: int) -> None``.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | Draft]:
        """For each row at most `num_drafts` token ids that may follow `token_ids`, alone or as a
        `Draft`; none is fine."""
        ...


class CachedProposer(Proposer, Protocol):
    """A proposer that keeps something of each step."""

    def follow(self, plan: StepPlan) -> None:
        """Blocks move as in `plan`, and rows of it are computed next."""
        ...

    def forget(self, seq_id: int) -> None:
        """The sequence is gone, or it comes back as a new one."""
        ...
