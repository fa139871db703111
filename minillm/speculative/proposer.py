"""The proposer interface: n-grams, draft models, draft heads, or a user's own object.

A proposer gets sequences and returns draft tokens. By default, drafts change the number of tokens
per step but not the tokens: `verify.py` accepts a draft only if it equals the token sampled at its
position.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from minillm.scheduling.plan import NewSequence


class DraftRow(NamedTuple):
    """A sequence that needs drafts.

    Attributes:
        new: its sampling parameters, seed and sample index; `new.seq_id` identifies it until
            `forget`.
        token_ids: prompt and output so far; read-only.
        num_drafts: maximum number of drafts.
        place: its row in the runner's block tables.
    """

    new: NewSequence
    token_ids: Sequence[int]
    num_drafts: int
    place: int


class Draft(NamedTuple):
    """Drafts of one row, with the distributions they were drawn from.

    Attributes:
        token_ids: at most `num_drafts` ids.
        dist: float32 [len(token_ids), V], the distribution that each was drawn from; None if the
            proposer does not sample, or samples with the noise of the target. Used only by
            ``rejection_sample_method="standard"``.
        parents: of a token tree (`models/trees.py`): for each draft the index of the draft that it
            follows, or -1 if it follows the last token. None if each follows the one before.
    """

    token_ids: Sequence[int]
    dist: Tensor | None = None
    parents: Sequence[int] | None = None


class Proposer(Protocol):
    """Proposes draft tokens. Only `propose` is required.

    Optional methods: ``follow(plan: StepPlan) -> None`` is called before each forward pass, for
    proposers with a KV cache; ``begin(new: NewSequence, token_ids: list[int]) -> None`` when a
    sequence is added or resumed, with the list to which its tokens are appended; and
    ``forget(seq_id: int) -> None`` when it is removed or preempted.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | Draft]:
        """For each row up to `num_drafts` token ids, as a sequence or a `Draft`; may be empty."""
        ...
