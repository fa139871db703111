"""How a `Linear` stores and applies its weight.

A layer owns one method. Packing and quantisation replace the method; they never subclass a layer.
A method decides what lies in the layer's `weight`, which `store` makes from the checkpoint's.
"""

from typing import Protocol

import torch
from torch import Tensor

from minillm import ops
from minillm.ops import cpu


class LinearMethod(Protocol):
    """Applies a weight to rows of activations."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], the stored weight, [out] -> [N, out]"""
        ...

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of the weight [out, in] at `ids` [N] -> [N, in], as an embedding wants them."""
        ...


class PlainLinearMethod:
    """The weight as the checkpoint has it, applied as the device does it best."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out, in], [out] -> [N, out]"""
        return ops.linear(x, weight, bias)

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """[N] -> [N, in]"""
        return ops.embedding(ids, weight)


class PanelLinearMethod:
    """bf16 on processors with AMX: panels of 32 outputs in the order in which they are read
    (`ops/c/linear.c`). The same bytes as before, and an embedding can still read its rows."""

    def __init__(self, out_features: int):
        self.out_features = out_features

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], panels, [out] -> [N, out]"""
        return cpu.panel_linear(x, weight, bias, self.out_features)

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """[N] -> [N, in]"""
        return cpu.rows_of_panels(weight, ids, self.out_features)


class PackedLinearMethod:
    """oneDNN's own layout, which its product wants and `F.linear` would make anew for each call.

    These are the private operations that inductor uses; `packed` says whether they work here.
    """

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], oneDNN's tensor, [out] -> [N, out]"""
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Only oneDNN can read its layout."""
        raise NotImplementedError("An embedding's weight is not packed by oneDNN.")


def packed(weight: Tensor) -> Tensor | None:
    """A weight [out, in] in oneDNN's layout; None where that is not to be had."""
    onednn = torch.ops.mkldnn
    try:
        result = onednn._reorder_linear_weight(weight, None)
        onednn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), result, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return result
