"""How a `Linear` stores and applies its weight.

A layer owns one method. Packing and quantisation replace the method; they never subclass a layer.
"""

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor


class LinearMethod(Protocol):
    """Applies a weight to rows of activations."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out, in], [out] -> [N, out]"""
        ...


class PlainLinearMethod:
    """The weight as the checkpoint has it, applied by torch."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out, in], [out] -> [N, out]"""
        return F.linear(x, weight, bias)
