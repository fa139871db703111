"""Typical acceptance, ``rejection_sample_method="typical"`` (Medusa: Cai et al., 2024, arXiv
2401.10774, section 2.3.1): a draft d is accepted if the target finds it plausible enough.

    p(d) > min(threshold, alpha * exp(-H(p)))      H: entropy of the target's distribution p

A rejected draft gives way to the target's sample. More drafts are accepted than by the other rules,
but the text no longer has the target's distribution: every output says so
(`RequestMetrics.acceptance`). Greedy text stays as it is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.ops.sampling import dist
from minillm.ops.transfers import indices
from minillm.sampling.rules import Verification


@dataclass(frozen=True)
class Typical:
    """The rule with these two numbers; p is after logits processors, temperature and truncation."""

    threshold: float
    alpha: float

    def choose(self, given: Verification) -> Tensor:
        """The draft if accepted, otherwise the target's sample: int64 [K]."""
        samples, logits, pack, drafted, _ = given
        p = dist(logits, pack).double()
        least = (torch.special.xlogy(p, p).sum(dim=-1).exp() * self.alpha).clamp(max=self.threshold)
        tokens = indices(p.device, [draft.token for draft in drafted])
        accepted = p.gather(1, tokens[:, None])[:, 0] > least
        return torch.where(accepted, tokens, samples)
