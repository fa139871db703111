"""Quantised matrices in panels: products in C (`ops/c/quantized.c`).

| codes | product |
|---|---|
| int8, int4, NF4, FP4 | integers, activations rounded to 8 bits by groups of 32 inputs |
| FP8 (e4m3) | float32, activations as they are (`ops/c/float8.c`) |

What C has no product for is made dense once, when the weights are packed (`to_dense`): groups or
inputs of other sizes, integers in a model of float32, and everything on a machine without C.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minillm.layers.linear_methods import LinearMethod, Matrix
from minillm.ops import c_library, cpu
from minillm.ops.cpu_experts import panel_experts
from minillm.ops.cpu_quantized import (
    EXACT,
    FLOAT8,
    MINIMA,
    PANEL,
    ZEROS,
    MatrixParts,
    fits,
    in_float8_order,
    packed_float8,
    packed_matrix,
    quantized_linear,
    rows_of_codes,
    rows_of_groups,
    whole_numbers,
)
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.quantized import Quantized, integer_codes, split_bytes

TENSORS = ("panels", "scales", "offsets", "numbers", "order")


class PanelQuantizedMethod(LinearMethod):
    """A quantised matrix, or stacked experts, in panels. Products round activations to 8 bits,
    unless the codes are FP8."""

    def __init__(self, parts: MatrixParts, dtype: torch.dtype, out_features: int):
        # The tensors are buffers of the layer; a second reference would keep them alive.
        none = dict.fromkeys(TENSORS[1:])
        self.numbers = replace(parts, panels=torch.empty(0), **none)  # type: ignore[arg-type]
        self.dtype, self.out_features = dtype, out_features
        self.threshold = 0.0  # of `outliers.py`

    def round_twice(self) -> None:
        """Round what remains of the activations, too: about 16 bits in place of 8."""
        self.numbers = replace(self.numbers, twice=True)

    def parts(self, matrix: Matrix) -> MatrixParts:
        """The matrix as C reads it."""
        buffers = dict(matrix.named_buffers(recurse=False))
        given = {name: buffers[name] for name in TENSORS if name in buffers}
        return replace(self.numbers, **given)  # type: ignore[arg-type]

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        return quantized_linear(x, self.parts(matrix), bias, self.out_features)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        return self._rows(matrix, ids).dense(self.dtype)

    def _rows(self, matrix: Matrix, ids: Tensor) -> Quantized:
        parts = self.parts(matrix)
        codes = rows_of_codes(parts.panels, ids, parts.bits)
        scales = rows_of_groups(parts.scales, ids)  # type: ignore[arg-type]
        offsets = None if parts.offsets is None else rows_of_groups(parts.offsets, ids)
        quantized = as_quantized(codes, scales, offsets, parts)
        table = dict(matrix.named_buffers(recurse=False)).get("table")
        order = None if parts.order is None else parts.order.long()
        return replace(quantized, table=table, order=order)

    def values(self, matrix: Matrix) -> Tensor:
        return self.lookup(matrix, torch.arange(self.out_features)).view(matrix.shape)

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """x [N, d], experts `ids` [N, k] and their `weights` [N, k] -> [N, d]."""
        method = down.method
        if not isinstance(method, PanelQuantizedMethod):
            raise RuntimeError("gate_up is quantised in panels, but down is not.")
        return panel_experts(x, self.parts(gate_up), method.parts(down), weights, ids)


def as_quantized(
    codes: Tensor, scales: Tensor, offsets: Tensor | None, parts: MatrixParts
) -> Quantized:
    """Unsigned codes [N, in] with scales and offsets [N, groups], as a `Quantized`."""
    if parts.float8:
        return Quantized(in_float8_order(codes).view(FLOAT8), scales)
    zeros = offsets if parts.offset_kind == ZEROS else None
    minima = offsets if parts.offset_kind == MINIMA else None
    if parts.bits == 8:
        return Quantized((codes.to(torch.int16) - 128).to(torch.int8), scales, zeros, minima)
    if parts.offset_kind == EXACT and parts.numbers is None:
        zeros = torch.full_like(scales, 8, dtype=torch.int8)
    return Quantized(integer_codes(codes, 4), scales, zeros, minima)


def is_int8(quantized: Quantized) -> bool:
    """Whether C has the codes as int8: also those of 4 bits in groups of other sizes than 32."""
    if quantized.bits == 8:
        return quantized.codes.dtype != FLOAT8
    return quantized.group_size % 32 > 0


def in_bytes(quantized: Quantized) -> Quantized:
    """4-bit codes as 8-bit codes of the same values; a table's numbers as `whole_numbers`."""
    codes = split_bytes(quantized.codes)
    if quantized.table is None:
        return replace(quantized, codes=codes.to(torch.int8))
    numbers, unit = whole_numbers(quantized.table)
    whole = (numbers.to(torch.int16) - 128).to(torch.int8)[codes.long()]
    return replace(quantized, codes=whole, scales=quantized.scales.float() * unit, table=None)


def runs_in_panels(matrix: Matrix) -> bool:
    """Whether C computes products with a quantised matrix, which `pack_quantized` then packs."""
    method = matrix.method
    if type(method) is not QuantizedMethod or not cpu.panels_are_fast(method.dtype):
        return False
    quantized = method.quantized(matrix)
    if not fits(quantized.shape[1], quantized.group_size, is_int8(quantized)):
        return False
    if matrix.copies is not None and (matrix.shape[1] % PANEL or method.threshold):
        return False  # experts would share a panel, or lose their outliers
    if quantized.codes.dtype == FLOAT8:
        return quantized.order is None and quantized.zeros is None and quantized.minima is None
    if quantized.table is not None and quantized.minima is not None:
        return False
    return method.dtype == torch.bfloat16  # float32 activations are not rounded


def arranged(parts: Quantized) -> MatrixParts:
    """A quantised matrix in panels."""
    if parts.codes.dtype == FLOAT8:
        return packed_float8(parts.codes, parts.scales)
    if parts.bits == 4 and is_int8(parts):
        parts = in_bytes(parts)
    if parts.bits == 4:
        codes = split_bytes(parts.codes)
    else:
        codes = (parts.codes.to(torch.int16) + 128).to(torch.uint8)
    offsets = parts.zeros, parts.minima
    return packed_matrix(codes, parts.bits, parts.scales, *offsets, parts.table, parts.order)


def pack_quantized(matrices: Sequence[Matrix]) -> int:
    """Put the quantised matrices that C supports into panels; returns their number.

    Codes lie in one allocation with huge pages, in the order in which they are read.
    """
    chosen = [one for one in matrices if runs_in_panels(one)]
    if not chosen:
        return 0
    places = list(code_bytes(chosen))
    memory = torch.empty(sum(places), dtype=torch.uint8)
    c_library.use_large_pages(memory.data_ptr(), memory.nbytes)
    for matrix, place in zip(chosen, memory.split(places), strict=True):
        pack_one(matrix, place)
    return len(chosen)


def code_bytes(matrices: Sequence[Matrix]) -> Iterator[int]:
    """Bytes of the codes of each matrix in panels."""
    for matrix in matrices:
        quantized = matrix.method.quantized(matrix)  # type: ignore[attr-defined]
        rows, width = quantized.shape
        bits = 8 if is_int8(quantized) else quantized.bits
        yield math.ceil(rows / PANEL) * PANEL * width * bits // 8


def pack_one(matrix: Matrix, place: Tensor) -> None:
    """Put a matrix into panels, its codes into `place`."""
    method: QuantizedMethod = matrix.method  # type: ignore[assignment]
    quantized = method.quantized(matrix)
    rows, table = quantized.shape[0], None if is_int8(quantized) else quantized.table
    parts = arranged(quantized)
    del quantized
    panels = place.view(parts.panels.shape).copy_(parts.panels)
    parts = replace(parts, panels=panels)
    for name in method.names:
        delattr(matrix, name)
    for name in TENSORS:
        matrix.register_buffer(name, getattr(parts, name))
    matrix.register_buffer("table", table)
    packed = PanelQuantizedMethod(parts, method.dtype, rows)
    packed.threshold = method.threshold
    matrix.method = packed
