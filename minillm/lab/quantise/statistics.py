"""What calibration records of the inputs of a matrix."""

import torch
from torch import Tensor


class InputStatistics:
    """Sums over the vectors x [in] that a matrix has multiplied.

    `hessian` is that of the squared error of one output row, ||(w - w') X||^2 / n:
    H = 2/n sum x x^T. All rows of a matrix share it.
    """

    def __init__(self, in_features: int, device: torch.device | str = "cpu"):
        self.count = 0
        self.products = torch.zeros(in_features, in_features, device=device)  # sum of x x^T
        self.total = torch.zeros(in_features, device=device)  # sum of |x|
        self.largest = torch.zeros(in_features, device=device)  # maximum of |x|

    def add(self, x: Tensor) -> None:
        """Count the vectors x [.., in]."""
        x = x.reshape(-1, x.shape[-1]).float()
        if not len(x):
            return
        self.count += len(x)
        self.products.addmm_(x.T, x)
        self.total += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))

    def scale(self, factors: Tensor) -> None:
        """What would have been recorded if x had been divided by `factors` [in]."""
        self.products /= factors[:, None] * factors
        self.total /= factors
        self.largest /= factors

    @property
    def hessian(self) -> Tensor:
        """2/n sum x x^T, [in, in]"""
        return self.products * (2 / max(self.count, 1))

    @property
    def mean(self) -> Tensor:
        """Mean of |x|, [in]"""
        return self.total / max(self.count, 1)


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """tr(D H D^T), the squared error of the outputs (times 2) for a difference D [out, in] of
    weights."""
    return ((difference @ hessian) * difference).sum()
