"""e10.1 another way: keep a finished mean and its log-sum-exp, and mix them.

The positions so far have the weight exp(lse), a new position has exp(score), and the new mean is
the mix of the old mean and the new value with these weights. One position at a time; merging is the
same step with a mean in the place of a value.
"""

import torch
from torch import Tensor


class OnlineSoftmax:
    """The weighted mean so far, and how much it weighs."""

    def __init__(self, dim: int) -> None:
        """Nothing weighs nothing."""
        self.mean = torch.zeros(dim, dtype=torch.float64)
        self.weight = torch.tensor(-torch.inf, dtype=torch.float64)  # as a logarithm

    def update(self, scores: Tensor, values: Tensor) -> None:
        """One after the other."""
        for score, value in zip(scores, values, strict=True):
            self._mix(score, value)

    def merge(self, other: "OnlineSoftmax") -> None:
        """All of the other is one value with a weight."""
        self._mix(other.weight, other.mean)

    def _mix(self, weight: Tensor, value: Tensor) -> None:
        if weight.isneginf():
            return
        difference = weight - self.weight  # may be plus infinity: then the share is 1
        share = torch.sigmoid(difference)
        if difference > 0:
            self.weight = weight + torch.log1p(torch.exp(-difference))
        else:
            self.weight = self.weight + torch.log1p(torch.exp(difference))
        self.mean = self.mean + share * (value - self.mean)

    def result(self) -> Tensor:
        """The mean is ready at any time."""
        return self.mean.clone()

    def log_sum_exp(self) -> float:
        """And so is this."""
        return self.weight.item()
