"""e10.1: a softmax that is fed piece by piece. The task is in README.md."""

from torch import Tensor


class OnlineSoftmax:
    """The mean of values, weighted by the softmax of scores that arrive in pieces.

    A score of minus infinity is masked. Before any other score, the result is 0 and the
    log-sum-exp is minus infinity.
    """

    def __init__(self, dim: int) -> None:
        """Begin without positions; a value has `dim` numbers in float64."""
        raise NotImplementedError("TODO e10.1: begin with a maximum, a sum and a sum of values")

    def update(self, scores: Tensor, values: Tensor) -> None:
        """Add n more positions, n at least 0: scores [n], values [n, dim]."""
        raise NotImplementedError("TODO e10.1: rescale the old sums to the new maximum, then add")

    def merge(self, other: "OnlineSoftmax") -> None:
        """Add all positions of `other`, and do not change `other`."""
        raise NotImplementedError("TODO e10.1: rescale both objects to one maximum, then add")

    def result(self) -> Tensor:
        """Return the weighted mean of all values so far [dim]."""
        raise NotImplementedError("TODO e10.1: divide, if the sum is not 0")

    def log_sum_exp(self) -> float:
        """Return the logarithm of the sum of exp(score) over all positions so far."""
        raise NotImplementedError("TODO e10.1: add the maximum again")
