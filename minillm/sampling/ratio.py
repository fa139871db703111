"""Rejection sampling, ``rejection_sample_method="standard"``: accept with probability min(1, p/q).

    p  target  |##    |######|####  |      the draft d was drawn from q
    q  draft   |######|####  |##    |      accept d with probability min(1, p(d) / q(d))
    min(p, q)  |##    |####  |##    |      accepted; the sum is the acceptance rate
    residual   |      |##    |##    |      if rejected, draw from max(p - q, 0), normalised

Emitted tokens have the distribution p (Leviathan et al., 2023, algorithm 1; Chen et al., 2023,
algorithm 2), and no rule accepts a single draft more often. p is the target's distribution after
logits processors, temperature, min-p, top-k and top-p. q can be any distribution, if the draft was
drawn from it.

Only the distribution is reproducible, not the tokens: those depend on where steps begin, and so on
the number of drafts and on preemption. Drafting, acceptance, resampling and plain sampling use
independent noise (`Purpose`); shared noise would change the distribution.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.ops.philox import Purpose
from minillm.ops.sampling import dist
from minillm.ops.transfers import indices
from minillm.sampling.rules import Verification, coins

Decision = Callable[[Tensor, Tensor, int], tuple[float | Tensor, Tensor]]


class Ratio:
    """Accepts drafts with a known distribution by the ratio of probabilities.

    For a deterministic draft (no distribution), the target's sample is kept. It equals the draft
    with probability p(d), and otherwise has the distribution of p without d, which is the residual.
    """

    def choose(self, given: Verification) -> Tensor:
        """Accepted drafts, and tokens from the residual for rejected ones: int64 [K]."""
        samples, logits, pack, drafted, _ = given
        dists = [draft.dist for draft in drafted if draft.dist is not None]
        if not dists:
            return samples
        where = [i for i, draft in enumerate(drafted) if draft.dist is not None]
        every = len(where) == len(samples)
        at = indices(samples.device, where)
        own = pack if every else pack.select(at)
        p = dist(logits if every else logits[at], own)
        q = torch.stack(dists).to(p)
        tokens = indices(p.device, [drafted[i].token for i in where])
        accept, resample = coins(own, Purpose.ACCEPT, Purpose.RESAMPLE)
        accepted = accept < accept_probability(p, q, tokens)
        if p.device.type == "cpu":
            left = (~accepted).nonzero()[:, 0]
            tokens[left] = draw(residual(p[left], q[left]), resample[left])
        else:  # all rows: to choose some, the host would wait for the device
            tokens = torch.where(accepted, tokens, draw(residual(p, q), resample))
        return samples.index_copy(0, at, tokens)


def accept_probability(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(d) / q(d)), or 0 if p(d) is 0: p, q [.., V], drafts int64 [..] -> float64 [..]

    Equal probabilities give exactly 1; there is no division by 0.
    """
    target, draft = (probs.gather(-1, token[..., None])[..., 0].double() for probs in (p, q))
    return torch.where(target >= draft, (target > 0).double(), target / draft)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(p - q, 0), normalised: [.., V] -> [.., V], the distribution after a rejection.

    If it is 0 everywhere, p and q differ only by rounding, and p is returned.
    """
    left = (p - q).clamp(min=0)
    total = left.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def draw(weights: Tensor, coin: Tensor) -> Tensor:
    """Inverse transform sampling from unnormalised weights: [K, V], coins [K] -> int64 [K]

    A token of weight 0 is never drawn. With NaN weights, the token is arbitrary.
    """
    sums = weights.cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(sums, coin[:, None] * sums[:, -1:], right=True)[:, 0]
    return places.clamp(max=weights.shape[1] - 1)


def ratio(p: Tensor, q: Tensor, token: int) -> tuple[Tensor, Tensor]:
    """This rule for one draft: its acceptance probability and the residual distribution."""
    return accept_probability(p, q, torch.tensor(token)), residual(p, q)


def emitted_dist(
    p: Tensor, q: Tensor, rule: Decision = ratio, drawn: Tensor | None = None
) -> Tensor:
    """The exact distribution [V] of the token that a rule emits, by enumerating all drafts.

    Args:
        p, q: distributions of target and draft, float64 [V].
        rule: (p, q, draft) -> acceptance probability, and distribution [V] after a rejection.
        drawn: the distribution that drafts are drawn from; by default q.
    """
    emitted = torch.zeros_like(p)
    for token, weight in enumerate(q if drawn is None else drawn):
        accepts, otherwise = rule(p, q, token)
        emitted += weight * (1 - accepts) * otherwise
        emitted[token] += weight * accepts
    return emitted
