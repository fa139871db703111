"""``rejection_sample_method="synthetic"``: drafts are accepted at given rates, for benchmarks.

The cost of verification does not depend on the weights, so speed can be measured with random
weights and at any acceptance rate. The generated text is meaningless.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.ops.philox import Purpose
from minillm.ops.sampling import choose
from minillm.ops.transfers import upload
from minillm.sampling.rules import Verification, coins


class Synthetic:
    """Accepts the draft at step i with probability `rates[i]`, if all before it are accepted.

    The decision is a function of seed, sample index and position.
    """

    def __init__(self, rates: Sequence[float]):
        self.rates = tuple(rates)

    def choose(self, given: Verification) -> Tensor:
        """The draft if accepted, otherwise a different token: int64 [K]. If no other token has a
        finite logit, the draft is accepted."""
        samples, logits, pack, drafts, model_dtype = given
        rates_at = np.array([self.rates[draft.step] for draft in drafts], dtype=np.float64)
        ids = np.array([draft.token for draft in drafts])
        tokens, rates = upload(samples.device, ids, rates_at)
        others = logits.scatter(1, tokens[:, None], -torch.inf)
        other, best = choose(others, pack, model_dtype, Purpose.RESAMPLE)
        accepted = (coins(pack, Purpose.ACCEPT)[0] < rates) | ~best.isfinite()
        return torch.where(accepted, tokens, other)
