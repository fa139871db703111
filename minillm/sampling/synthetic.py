"""``rejection_sample_method="synthetic"``: drafts are accepted as often as one asks for.

Verification costs the same whatever the weights are, so the speed of a model can be measured before
there are weights, and for any acceptance. The text means nothing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from minillm.ops.philox import Purpose
from minillm.ops.sampling import Pack, choose
from minillm.sampling.rules import DraftedToken, coins


class Synthetic:
    """Accepts the draft at step i with probability `rates[i]`, if all before it are accepted.

    Which drafts these are is a function of seed, sample index and position.
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
        """The draft, or a token that is none: int64 [K]. Where no other token has a finite logit,
        the draft stays."""
        device = samples.device
        tokens = torch.tensor([each.token for each in drafted]).to(device)
        rates = torch.tensor([self.rates[each.step] for each in drafted], dtype=torch.float64)
        others = logits.scatter(1, tokens[:, None], -torch.inf)
        other, best = choose(others, pack, model_dtype, Purpose.RESAMPLE)
        accepted = (coins(pack, Purpose.ACCEPT)[0] < rates.to(device)) | ~best.isfinite()
        return torch.where(accepted, tokens, other)
