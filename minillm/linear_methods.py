"""How a `Linear` stores and applies its weight.

A layer owns one method. Packing and quantisation replace the method; they never subclass a layer.
"""

from typing import Protocol

from torch import Tensor

from minillm import ops


class LinearMethod(Protocol):
    """Applies a weight to rows of activations."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out, in], [out] -> [N, out]"""
        ...


class PlainLinearMethod:
    """The weight as the checkpoint has it, applied as the device does it best."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out, in], [out] -> [N, out]"""
        return ops.linear(x, weight, bias)
