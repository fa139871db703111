"""Quantised matrices in panels: products in C with activations of 8 bits (`ops/c/quantized.c`)."""

from dataclasses import replace

import torch
from torch import Tensor

from minillm.layers.linear_methods import LinearMethod, Matrix
from minillm.ops import cpu
from minillm.ops.cpu_quantized import (
    EXACT,
    MINIMA,
    ZEROS,
    MatrixParts,
    fits,
    packed_matrix,
    quantized_linear,
    rows_of_codes,
    rows_of_groups,
)
from minillm.quantization.integers import split_bytes
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.quantized import Quantized, integer_codes

TENSORS = ("panels", "scales", "offsets")


class PanelQuantizedMethod(LinearMethod):
    """A quantised matrix in panels. Products round each row of activations to 8 bits."""

    def __init__(self, parts: MatrixParts, dtype: torch.dtype, out_features: int):
        # The tensors are buffers of the layer; a second reference would keep them alive.
        self.numbers = replace(parts, panels=torch.empty(0), scales=None, offsets=None)
        self.dtype, self.out_features = dtype, out_features

    def parts(self, matrix: Matrix) -> MatrixParts:
        """The matrix as C reads it."""
        buffers = dict(matrix.named_buffers(recurse=False))
        given = {name: buffers[name] for name in TENSORS if name in buffers}
        return replace(self.numbers, **given)  # type: ignore[arg-type]

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        return quantized_linear(x, self.parts(matrix), bias, self.out_features)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """[N] -> [N, in], dense rows of a tied embedding."""
        parts = self.parts(matrix)
        codes = rows_of_codes(parts.panels, ids, parts.bits)
        scales = rows_of_groups(parts.scales, ids)  # type: ignore[arg-type]
        offsets = None if parts.offsets is None else rows_of_groups(parts.offsets, ids)
        return as_quantized(codes, scales, offsets, parts).dense(self.dtype)

    def values(self, matrix: Matrix) -> Tensor:
        """The dense matrix, made for this call."""
        ids = torch.arange(self.out_features)
        return self.lookup(matrix, ids)


def as_quantized(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, parts: MatrixParts
) -> Quantized:
    """Unsigned codes [N, in] with scales and offsets [N, groups], as a `Quantized`."""
    zeros = offsets if parts.offset_kind == ZEROS else None
    minima = offsets if parts.offset_kind == MINIMA else None
    if parts.bits == 8:
        return Quantized((codes.to(torch.int16) - 128).to(torch.int8), scales, zeros, minima)
    if parts.offset_kind == EXACT:
        zeros = torch.full_like(scales, 8, dtype=torch.int8)
    return Quantized(integer_codes(codes, 4), scales, zeros, minima)


def pack_quantized(matrix: Matrix) -> bool:
    """Put a quantised matrix into panels; False if C does not support it."""
    method = matrix.method
    if type(method) is not QuantizedMethod or matrix.copies is not None:
        return False
    found = method.quantized(matrix)
    integers = found.codes.dtype in (torch.int8, torch.uint8)
    plain = integers and found.table is None and found.order is None
    if not plain or not fits(*found.shape, found.group_size, found.bits):
        return False
    if method.dtype != torch.bfloat16 or not cpu.panels_are_fast(method.dtype):
        return False
    codes = (
        split_bytes(found.codes)
        if found.bits == 4
        else (found.codes.to(torch.int16) + 128).to(torch.uint8)
    )
    parts = packed_matrix(codes, found.bits, found.scales, found.zeros, found.minima)
    for name in method.names:
        delattr(matrix, name)
    for name in TENSORS:
        matrix.register_buffer(name, getattr(parts, name))
    matrix.method = PanelQuantizedMethod(parts, method.dtype, found.shape[0])
    return True
