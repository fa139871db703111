"""Rescale the old sums to the new maximum, then add: `update` and `merge` share this step.

Sums of exp(score - m) can be added only if they have the same m. `_raise` rescales the object's own
sums to a maximum that is at least as large as the old one. The factor is at most 1, so nothing
overflows in any order of scores. After that, a piece of new positions is added, or the sums of
another object, which need their own factor. So pieces may also be summed in parallel, by programs
that do not know each other's maximum, and combined at the end. This is split-KV decoding.

Before any unmasked score, m is minus infinity, and m - m is NaN. The guard is one line: subtract 0
instead. exp(-inf - 0) is 0, which is the right weight for a masked position.
"""

import math

import torch
from torch import Tensor


class OnlineSoftmax:
    """The running maximum, the sum of exp(score - maximum), and that sum weighted with values."""

    def __init__(self, dim: int) -> None:
        """Nothing was fed yet."""
        self.top = -math.inf
        self.total = 0.0
        self.mixed = torch.zeros(dim, dtype=torch.float64)

    def update(self, scores: Tensor, values: Tensor) -> None:
        """Take n more positions: scores [n], values [n, dim]."""
        if len(scores) == 0:
            return
        base = self._raise(float(scores.max()))
        weights = (scores - base).exp()
        self.total += float(weights.sum())
        self.mixed = self.mixed + weights @ values

    def merge(self, other: "OnlineSoftmax") -> None:
        """Take everything that `other` was fed."""
        base = self._raise(other.top)
        theirs = math.exp(other.top - base)
        self.total += other.total * theirs
        self.mixed = self.mixed + other.mixed * theirs

    def _raise(self, top: float) -> float:
        """Make the maximum at least `top`; what to subtract from a score from now on."""
        top = max(self.top, top)
        base = 0.0 if top == -math.inf else top
        fade = math.exp(self.top - base)
        self.total *= fade
        self.mixed = self.mixed * fade
        self.top = top
        return base

    def result(self) -> Tensor:
        """Return the weighted mean of all values so far [dim]."""
        return torch.zeros_like(self.mixed) if self.total == 0 else self.mixed / self.total

    def log_sum_exp(self) -> float:
        """The logarithm of the sum of exp(score) so far."""
        return -math.inf if self.total == 0 else self.top + math.log(self.total)
