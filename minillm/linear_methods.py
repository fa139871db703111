"""How a `Linear` stores and applies its weight.

A layer owns one method. Packing and quantisation replace the method; they never subclass a layer.
A method decides what lies in the layer's `weight`; `models/packing.py` puts it there.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from minillm import ops
from minillm.ops import cpu

ROWS = (1, 2, 4, 8, 16, 64, 256)
MOST_PADDED = 16


class LinearMethod(Protocol):
    """Applies a weight to rows of activations."""

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], the stored weight, [out] -> [N, out]"""
        ...


class EmbeddingMethod(LinearMethod, Protocol):
    """The same for a weight whose rows are looked up, too."""

    def lookup(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of the weight [out, in] at `ids` [N] -> [N, in]"""
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

    Only oneDNN can read it, so it is none for an embedding. These are the private operations that
    inductor uses; `packed` says whether they work here.
    oneDNN writes a program for every number of rows that it meets, which takes milliseconds, and
    keeps it: 0.7 MB each. So it only ever meets `ROWS`; others are composed of these, and a rest
    is padded.
    """

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], oneDNN's tensor, [out] -> [N, out]"""
        product = torch.ops.mkldnn._linear_pointwise.default
        if len(x) in ROWS:
            return product(x, weight, bias, "none", [], "")
        out = x.new_empty(len(x), weight.shape[0])
        for start, count, size in row_parts(len(x)):
            part = x[start : start + count]
            if count < size:
                part = torch.cat((part, x.new_zeros(size - count, x.shape[1])))
            out[start : start + count] = product(part, weight, bias, "none", [], "")[:count]
        return out


def row_parts(num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Cut rows into parts of `ROWS`: where each starts, how many rows it has, and its size, which
    is more only for the last."""
    start = 0
    while (rest := num_rows - start) > 0:
        small = rest <= MOST_PADDED
        size = min(n for n in ROWS if n >= rest) if small else max(n for n in ROWS if n <= rest)
        yield start, min(size, rest), size
        start += size


def packed(weight: Tensor) -> Tensor | None:
    """A weight [out, in] in oneDNN's layout; None where that is not to be had."""
    onednn = torch.ops.mkldnn
    try:
        result = onednn._reorder_linear_weight(weight, None)
        onednn._linear_pointwise(weight.new_zeros(1, weight.shape[1]), result, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return None
    return result
