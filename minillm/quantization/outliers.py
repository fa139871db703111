"""LLM.int8() (Dettmers et al., 2022, arXiv 2208.07339) in C panels: outlying inputs in 16 bits.

    x W^T = x_8 W^T + o W^T,   o: the entries of x with |x| >= threshold, x_8: the others

A single outlier would take the precision of all other entries of its row. `x_8 W^T` is the product
of the panels, which rounds each row to 8 bits. `o W^T` reads only the columns of W that some row
needs. An entry of o is a multiple of 2^-5 (bfloat16 from 4 on), so its products with codes and
their sums are exact in float64. The paper, as bitsandbytes, takes whole columns of the batch: those
with an outlier in any row. Here a row's result does not depend on other rows.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from minillm.layers.linear_methods import Matrix
from minillm.quantization.panels import PanelQuantizedMethod

THRESHOLD = 6.0


class OutlierMethod(PanelQuantizedMethod):
    """A matrix with 8-bit codes and a scale per row, in panels."""

    def __init__(self, method: PanelQuantizedMethod):
        super().__init__(method.numbers, method.dtype, method.out_features)
        self.threshold = method.threshold

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        outlying = x.abs() >= self.threshold
        columns = outlying.any(0).nonzero().flatten()
        if not len(columns):
            return super().apply(matrix, x, bias)
        rest = super().apply(matrix, x.masked_fill(outlying, 0), bias)
        codes, scales = self.columns(matrix, columns)  # [out, n], [out]
        few = x.masked_fill(~outlying, 0)[:, columns]
        sums = few.double() @ codes.double().T  # exact
        return (rest.float() + sums.float() * scales).to(x.dtype)

    def columns(self, matrix: Matrix, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Signed codes [out, n] of some columns, and the scale of each row [out]."""
        parts = self.parts(matrix)
        stored = parts.panels[:, columns // 4, :, columns % 4]  # [n, out / 32, 32]
        codes = stored.flatten(1).T[: self.out_features].to(torch.int16) - 128
        scales = parts.scales.flatten()[: self.out_features]  # type: ignore[union-attr]
        return codes, scales.float()


def separate_outliers(matrices: Iterable[Matrix]) -> int:
    """Separate the outliers of the packed matrices that ask for it; returns their number."""
    count = 0
    for matrix in matrices:
        method = matrix.method
        if type(method) is PanelQuantizedMethod and method.threshold:
            matrix.method = OutlierMethod(method)
            count += 1
    return count
