"""``rejection_sample_method="synthetic"``: drafts are accepted at given rates, for benchmarks.

The cost of verification does not depend on the weights, so speed can be measured with random
weights and at any acceptance rate. The generated text is meaningless.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, choose
from minillm.ops.transfers import upload
from minillm.sampling.rules import DraftedToken, coins


class Synthetic:
    """Accepts the draft at step i with probability `rates[i]`, if all before it are accepted.

    The decision is a function of seed, sample index and position.
    """

    def __init__(self, rates: Sequence[float]):
        self.rates = tuple(rates)

    def choose(
        self,
        samples: Tensor,
        logits: Tensor,
        pack: Pack,
        drafted: Sequence[DraftedToken],
        model_dtype: torch.dtype,
    ) -> Tensor:
        """The draft if accepted, otherwise a different token: int64 [K]. If no other token has a
        finite logit, the draft is accepted."""
        device = samples.device
        given = [each.token for each in drafted], [self.rates[each.step] for each in drafted]
        tokens, rates = upload(device, np.array(given[0]), np.array(given[1], dtype=np.float64))
        others = logits.scatter(1, tokens[:, None], -torch.inf)
        other, best = choose(others, pack, model_dtype, Purpose.RESAMPLE)
        accepted = (coins(pack, Purpose.ACCEPT)[0] < rates) | ~best.isfinite()
        return torch.where(accepted, tokens, other)
