"""``rejection_sample_method="standard"``: a draft is accepted with probability min(1, p / q).

    p  target  |##    |######|####  |      the draft d was drawn from q
    q  draft   |######|####  |##    |      accept d with probability min(1, p(d) / q(d))
    min(p, q)  |##    |####  |##    |      what is accepted: its sum is the acceptance
    residual   |      |##    |##    |      max(p - q, 0): else draw from this, normalised

What is emitted has the law p (Leviathan et al., 2023, algorithm 1; Chen et al., 2023, algorithm 2),
and no rule accepts one draft more often. p is the law after all edits, temperature, min-p, top-k
and top-p; q may be any law, as long as the draft was really drawn from it.

The law is what this rule promises, not the tokens: they depend on where steps begin, and so on the
number of drafts and on preemptions. Drawing the draft, accepting it, drawing from the residual and
sampling have noise of their own (`Purpose`), without which the law would be another.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, law
from minillm.sampling.rules import DraftedToken, coins

Decision = Callable[[Tensor, Tensor, int], tuple[float | Tensor, Tensor]]


class Ratio:
    """Accepts drafts that come with their law by the ratio of probabilities.

    Beside a draft that was not drawn the sample stays: it equals the draft with probability p(d),
    and if it does not, it is distributed as p without d, which is the residual.
    """

    def choose(
        self,
        samples: Tensor,
        logits: Tensor,
        pack: Pack,
        drafted: Sequence[DraftedToken],
        model_dtype: torch.dtype,
    ) -> Tensor:
        """Accepted drafts, and tokens from the residual in place of the others: int64 [K]."""
        laws = [each.law for each in drafted if each.law is not None]
        if not laws:
            return samples
        where = [i for i, each in enumerate(drafted) if each.law is not None]
        every = len(where) == len(samples)
        at = torch.tensor(where).to(samples.device)
        own = pack if every else pack.select(at)
        p = law(logits if every else logits[at], own)
        q = torch.stack(laws).to(p)
        tokens = torch.tensor([drafted[i].token for i in where]).to(p.device)
        accept, resample = coins(own, Purpose.ACCEPT, Purpose.RESAMPLE)
        accepted = accept < accept_probability(p, q, tokens)
        left = (~accepted).nonzero()[:, 0]  # the device is waited for
        tokens[left] = draw(residual(p[left], q[left]), resample[left])
        return samples.index_copy(0, at, tokens)


def accept_probability(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(d) / q(d)), and 0 where p(d) is 0: laws [.., V], drafts int64 [..] -> float64 [..]

    Equal probabilities are accepted always, and nothing is divided by 0.
    """
    target, draft = (each.gather(-1, token[..., None])[..., 0].double() for each in (p, q))
    return torch.where(target >= draft, (target > 0).double(), target / draft)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), normalised: [.., V] -> [.., V], what a rejected draft is replaced from.

    Where nothing is left, p and q are equal but for rounding, and p itself takes its place.
    """
    left = (p - q).clamp(min=0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def draw(weights: Tensor, coin: Tensor) -> Tensor:
    """The token at which the sum of weights passes this share of it: [K, V], [K] -> int64 [K]

    A token of weight 0 is never drawn. Where weights are NaN, it is some token.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(sums, coin[:, None] * sums[:, -1:], right=True)[:, 0]
    return found.clamp(max=weights.shape[1] - 1)


def ratio(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """This rule on one draft: the probability that it is accepted, and what else is drawn from."""
    return accept_probability(p, q, torch.tensor(token)), residual(p, q)


def emitted_law(
    p: Tensor, q: Tensor, rule: Decision = ratio, drawn: Tensor | None = None
) -> Tensor:
    """The exact law of the token that a rule emits, by going through all drafts: [V]

    Args:
        p, q: laws of the target and the draft, float64 [V].
        rule: from p, q and a draft to the probability that it is accepted, and the law [V] of what
            is emitted if not.
        drawn: the law that drafts are really drawn from, where it is another than q.
    """
    emitted = torch.zeros_like(p)
    for token, weight in enumerate(q if drawn is None else drawn):
        accepts, otherwise = rule(p, q, token)
        emitted += weight * (1 - accepts) * otherwise
        emitted[token] += weight * accepts
    return emitted
