"""One function does both: a piece that comes in is another object with sums of its own.

Whoever adds sums of exp(score - m) has to agree on m first. `_add` lowers both sides to the larger
maximum, by a factor that is at most 1, so nothing overflows in whatever order scores come. Then
`update` is `merge` with a piece. Read backwards: the pieces may be summed up in parallel, by
programs that do not know each other's maximum, and joined at the end. That is split-KV decoding.

While nothing real was seen, m is minus infinity, and m - m is NaN. The guard is one line: subtract
0 instead. exp(-inf - 0) is 0, which is the right weight for a position that nobody sees.
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
        top = float(scores.max())
        base = 0.0 if top == -math.inf else top
        weights = (scores - base).exp()
        self._add(top, float(weights.sum()), weights @ values)

    def merge(self, other: "OnlineSoftmax") -> None:
        """Take everything that `other` was fed."""
        self._add(other.top, other.total, other.mixed)

    def _add(self, top: float, total: float, mixed: Tensor) -> None:
        """Bring both sides to the larger maximum and add them."""
        highest = max(self.top, top)
        base = 0.0 if highest == -math.inf else highest
        mine, theirs = math.exp(self.top - base), math.exp(top - base)
        self.total = self.total * mine + total * theirs
        self.mixed = self.mixed * mine + mixed * theirs
        self.top = highest

    def result(self) -> Tensor:
        """The weighted mean of all values so far [dim]."""
        return torch.zeros_like(self.mixed) if self.total == 0 else self.mixed / self.total

    def log_sum_exp(self) -> float:
        """The logarithm of the sum of exp(score) so far."""
        return -math.inf if self.total == 0 else self.top + math.log(self.total)
