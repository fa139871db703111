"""Quantised matrices in panels: products in C with activations of 8 bits (`ops/c/quantized.c`)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from minillm.layers.linear_methods import (
    LinearMethod,
    Matrix,
    PackedLinearMethod,
    PanelLinearMethod,
)
from minillm.ops import c_library, cpu
from minillm.ops.cpu_experts import panel_experts
from minillm.ops.cpu_quantized import (
    EXACT,
    MINIMA,
    PANEL,
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

TENSORS = ("panels", "scales", "offsets", "numbers", "order")
FLOAT8 = (torch.float8_e4m3fn,)


class PanelQuantizedMethod(LinearMethod):
    """A quantised matrix, or stacked experts, in panels. Products round each row of activations to
    8 bits."""

    def __init__(self, parts: MatrixParts, dtype: torch.dtype, out_features: int):
        # The tensors are buffers of the layer; a second reference would keep them alive.
        none = dict.fromkeys(TENSORS[1:])
        self.numbers = replace(parts, panels=torch.empty(0), **none)  # type: ignore[arg-type]
        self.dtype, self.out_features = dtype, out_features
        self.threshold = 0.0  # of `outliers.py`

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
        return self._rows(matrix, ids).dense(self.dtype)

    def _rows(self, matrix: Matrix, ids: Tensor) -> Quantized:
        parts = self.parts(matrix)
        codes = rows_of_codes(parts.panels, ids, parts.bits)
        scales = rows_of_groups(parts.scales, ids)  # type: ignore[arg-type]
        offsets = None if parts.offsets is None else rows_of_groups(parts.offsets, ids)
        found = as_quantized(codes, scales, offsets, parts)
        table = dict(matrix.named_buffers(recurse=False)).get("table")
        order = None if parts.order is None else parts.order.long()
        return replace(found, table=table, order=order)

    def values(self, matrix: Matrix) -> Tensor:
        """The dense matrix, made for this call."""
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
    zeros = offsets if parts.offset_kind == ZEROS else None
    minima = offsets if parts.offset_kind == MINIMA else None
    if parts.bits == 8:
        return Quantized((codes.to(torch.int16) - 128).to(torch.int8), scales, zeros, minima)
    if parts.offset_kind == EXACT and parts.numbers is None:
        zeros = torch.full_like(scales, 8, dtype=torch.int8)
    return Quantized(integer_codes(codes, 4), scales, zeros, minima)


def in_bytes(found: Quantized) -> Quantized:
    """4-bit codes in groups that C supports only with 8 bits (of 16), as 8-bit codes of the same
    values; others unchanged."""
    if found.bits == 8 or found.table is not None or found.group_size % 32 == 0:
        return found
    return replace(found, codes=split_bytes(found.codes).to(torch.int8))


def runs_in_panels(matrix: Matrix) -> bool:
    """Whether C computes products with a quantised matrix, which `pack_quantized` then packs."""
    method = matrix.method
    if type(method) is not QuantizedMethod:
        return False
    found = in_bytes(method.quantized(matrix))
    if found.codes.dtype in FLOAT8 or not fits(*found.shape, found.group_size, found.bits):
        return False
    if found.table is not None and found.minima is not None:
        return False
    if matrix.copies is not None and (matrix.shape[1] % PANEL or method.threshold):
        return False  # experts would share a panel, or lose their outliers
    return method.dtype == torch.bfloat16 and cpu.panels_are_fast(method.dtype)


def arranged(found: Quantized) -> MatrixParts:
    """A quantised matrix in panels."""
    found = in_bytes(found)
    if found.bits == 4:
        codes = split_bytes(found.codes)
    else:
        codes = (found.codes.to(torch.int16) + 128).to(torch.uint8)
    offsets = found.zeros, found.minima
    return packed_matrix(codes, found.bits, found.scales, *offsets, found.table, found.order)


def pack_quantized(matrices: Sequence[Matrix]) -> int:
    """Put the quantised matrices that C supports into panels; returns their number.

    Codes lie in one allocation with huge pages, in the order in which they are read.
    """
    chosen = [each for each in matrices if runs_in_panels(each)]
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
        found = in_bytes(matrix.method.quantized(matrix))  # type: ignore[attr-defined]
        rows, width = found.shape
        yield math.ceil(rows / PANEL) * PANEL * width * found.bits // 8


def pack_one(matrix: Matrix, place: Tensor) -> None:
    """Put a matrix into panels, its codes into `place`."""
    method: QuantizedMethod = matrix.method  # type: ignore[assignment]
    found = method.quantized(matrix)
    rows, table = found.shape[0], found.table
    parts = arranged(found)
    del found
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


def kernel_of(matrix: Matrix) -> str:
    """The kernel of a matrix's products on this processor, and the resident form that it reads.

    "dense for each call" is the slow case: no kernel reads the form, so a matrix is made dense
    whenever it is used.
    """
    method = matrix.method
    if isinstance(method, PanelQuantizedMethod):
        outliers = f", from {method.threshold:g} on of 16" * bool(method.threshold)
        return f"C panels, {form_of(method.parts(matrix))}, activations of 8 bits{outliers}"
    if isinstance(method, QuantizedMethod):
        found = method.quantized(matrix)
        kind = "FP8" if found.codes.dtype in FLOAT8 else f"int{found.bits}"
        return f"dense for each call, {kind}, groups of {found.group_size}"
    width = f"{method_dtype(matrix)}, not quantised"
    if isinstance(method, PanelLinearMethod):
        return f"C panels, {width}"
    return f"{'oneDNN' if isinstance(method, PackedLinearMethod) else 'torch'}, {width}"


def form_of(parts: MatrixParts) -> str:
    """The form of codes: bits or table, group, offsets, order."""
    kind = f"int{parts.bits}" if parts.numbers is None else "table of 16 values"
    offsets = {ZEROS: ", zero points", MINIMA: ", minima"}.get(parts.offset_kind, "")
    order = "" if parts.order is None else ", act order"
    return f"{kind}, groups of {parts.group}{offsets}{order}"


def method_dtype(matrix: Matrix) -> str:
    """The name of the type in which a matrix that is not quantised is stored."""
    tensors = [*matrix.parameters(recurse=False), *matrix.buffers(recurse=False)]
    return str(tensors[0].dtype).removeprefix("torch.") if tensors else "no tensors"
