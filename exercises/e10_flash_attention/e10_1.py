"""e10.1: a softmax that is fed piece by piece. The task is in README.md."""

from torch import Tensor


class OnlineSoftmax:
    """The mean of values, weighted by the softmax of scores that come in pieces.

    A score of minus infinity is masked. Before any other score: result 0, log-sum-exp minus
    infinity.
    """

    def __init__(self, dim: int) -> None:
        """Nothing was fed yet; values will have `dim` numbers, in float64."""
        raise NotImplementedError("TODO e10.1: begin with a maximum, a sum and a sum of values")

    def update(self, scores: Tensor, values: Tensor) -> None:
        """Take n more positions, n at least 0: scores [n], values [n, dim]."""
        raise NotImplementedError("TODO e10.1: bring the old sums to the new maximum, then add")

    def merge(self, other: "OnlineSoftmax") -> None:
        """Take everything that `other` was fed, and leave `other` as it is."""
        raise NotImplementedError("TODO e10.1: bring both sides to one maximum, then add")

    def result(self) -> Tensor:
        """The weighted mean of all values so far [dim]."""
        raise NotImplementedError("TODO e10.1: divide, if there is anything to divide")

    def log_sum_exp(self) -> float:
        """The logarithm of the sum of exp(score) over all positions so far."""
        raise NotImplementedError("TODO e10.1: put the maximum back")
