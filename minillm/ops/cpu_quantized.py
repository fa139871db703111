"""Quantised matrices in panels, and products with them in C (`c/quantized.c`, `c/float8.c`).

Activations are rounded to 8 bits, with a scale for each 32 inputs of a row: "W8A8" and "W4A8". For
the output matrix what remains of them is rounded again (`twice`). With FP8 codes they are not
rounded.
"""

from collections.abc import Mapping
from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.cpu_checks import check, check_vector
from minillm.ops.cpu_structures import filled

PANEL = 32  # outputs of a panel, as in linear.c
MOST_INPUTS = 1 << 16  # integer sums of longer rows could overflow
SCALE_KINDS: Mapping[torch.dtype, int] = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT8 = torch.float8_e4m3fn
FLOAT8_ORDER = (0, 2, 1, 3)  # of four inputs of an output; its own inverse
EXACT, ZEROS, MINIMA = 0, 1, 2  # kinds of offsets, as in matrix.h; EXACT is 8 for 4-bit codes


@dataclass(frozen=True)
class MatrixParts:
    """A matrix as C reads it: elements in panels (without scales), or codes with scales. The fields
    are those of `matrix` in matrix.h."""

    panels: Tensor
    scales: Tensor | None = None
    offsets: Tensor | None = None
    numbers: Tensor | None = None
    order: Tensor | None = None
    bits: int = 0
    group: int = 0
    scale_kind: int = 0
    offset_kind: int = EXACT
    unit: float = 1.0
    float8: bool = False
    twice: bool = False
    outputs: int = 0
    next: "MatrixParts | None" = None


def inputs_of(matrix: MatrixParts) -> int:
    """The number of inputs of a matrix."""
    if matrix.scales is None:
        return 2 * matrix.panels.shape[1]
    return matrix.panels[0].numel() * 8 // (matrix.bits * PANEL)


def fits(in_features: int, group: int, is_int8: bool) -> bool:
    """Whether C supports a matrix with these groups: of 16 inputs for int8, of 32 for others."""
    step = 16 if is_int8 else 32
    return group % step == 0 and in_features % 32 == 0 and 0 < in_features <= MOST_INPUTS


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Unsigned codes uint8 [out, in] -> panels [ceil(out / 32), in / 4, 32, 4], or for 4 bits
    [ceil(out / 32), in / 32, 4, 32, 4] with two codes to a byte. Missing rows are 0."""
    out, size = codes.shape
    missing = -out % PANEL
    if missing:
        codes = torch.cat((codes, codes.new_zeros(missing, size)))
    by_panel = codes.view(-1, PANEL, size)
    if bits == 8:
        return by_panel.unflatten(2, (-1, 4)).transpose(1, 2).contiguous()
    halves = by_panel.unflatten(2, (-1, 2, 4, 4)).permute(
        0, 2, 3, 4, 1, 5
    )  # [P, k, half, j, 32, 4]
    return (halves[:, :, 0] | halves[:, :, 1] << 4).contiguous()


def pack_groups(values: Tensor) -> Tensor:
    """A value per output and group [out, groups] -> [ceil(out / 32), groups, 32]."""
    missing = -len(values) % PANEL
    if missing:
        values = torch.cat((values, values.new_zeros(missing, values.shape[1])))
    return values.view(-1, PANEL, values.shape[1]).transpose(1, 2).contiguous()


def whole_numbers(table: Tensor) -> tuple[Tensor, float]:
    """A table float32 [16] as whole numbers of up to 127 times a unit: uint8 [16], with 128 added,
    and the unit.

    Of the units with which the largest number is 1 to 127, the one with the smallest error. FP4 is
    exact. NF4 has an error of up to 0.4% of the largest number of a group, where half the distance
    of its levels is 4% to 15%.
    """
    most = table.abs().amax().double()
    units = most / torch.arange(1, 128, dtype=torch.float64)
    numbers = (table.double() / units[:, None]).round()
    errors = (numbers * units[:, None] - table.double()).square().sum(1)
    best = int((errors <= errors.min() * (1 + 1e-6) + 1e-14 * most**2).nonzero()[0])
    return (numbers[best] + 128).to(torch.uint8), float(units[best])


def packed_matrix(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    minima: Tensor | None,
    table: Tensor | None = None,
    order: Tensor | None = None,
) -> MatrixParts:
    """Arrange unsigned codes uint8 [out, in] with their scales, and zero points int8 or minima, all
    [out, groups]; with the table [16] of 4-bit codes, and the input of each column [in]. Signed
    8-bit codes have 128 added, their zero points have not."""
    if bits == 4 and zeros is not None and bool((zeros == 8).all()):
        zeros = None  # C knows this one
    given = zeros if minima is None else minima
    numbers, unit = (None, 1.0) if table is None else whole_numbers(table)
    return MatrixParts(
        panels=pack_codes(codes, bits),
        scales=pack_groups(scales),
        offsets=None if given is None else pack_groups(given),
        numbers=numbers,
        order=None if order is None else order.to(torch.int32),
        bits=bits,
        group=codes.shape[1] // scales.shape[1],
        scale_kind=SCALE_KINDS[scales.dtype],
        offset_kind=EXACT if given is None else ZEROS if minima is None else MINIMA,
        unit=unit,
    )


def packed_float8(codes: Tensor, scales: Tensor) -> MatrixParts:
    """Arrange float8_e4m3fn codes [out, in] with their scales [out, groups]. The scale of a group
    with a NaN is NaN, because C does not look for the code of NaN."""
    codes = codes.view(torch.uint8)
    groups = codes.unflatten(1, (scales.shape[1], -1))
    scales = scales.masked_fill(((groups & 0x7F) == 0x7F).any(-1), float("nan"))
    return MatrixParts(
        panels=pack_codes(in_float8_order(codes), 8),
        scales=pack_groups(scales),
        bits=8,
        group=groups.shape[2],
        scale_kind=SCALE_KINDS[scales.dtype],
        float8=True,
    )


def in_float8_order(codes: Tensor) -> Tensor:
    """Every four inputs of [.., in] in `FLOAT8_ORDER`; called again, as before."""
    return codes.unflatten(-1, (-1, 4))[..., FLOAT8_ORDER].flatten(-2)


def quantized_linear(x: Tensor, matrix: MatrixParts, bias: Tensor | None, out: int) -> Tensor:
    """x [N, in], which is rounded to 8 bits by groups of 32 inputs -> [N, out]"""
    x = x.contiguous()
    count, size = x.shape
    inputs = inputs_of(matrix)
    check(size == inputs and -(-out // PANEL) == len(matrix.panels), "x", x, f"[N, {inputs}]")
    if bias is not None:
        check_vector("bias", bias, out, x.dtype)
    y = x.new_empty(count, out)
    address = None if bias is None else bias.data_ptr()
    run = cpu.ready(x.dtype).quantized_product
    if run(x.data_ptr(), byref(filled(matrix)), address, y.data_ptr(), count, size, out, 0):
        raise MemoryError("Out of memory for rounded activations.")
    return y


def rows_of_codes(panels: Tensor, ids: Tensor, bits: int) -> Tensor:
    """Unsigned codes [N, in] of rows `ids` of `pack_codes`' panels."""
    if bits == 8:
        return panels[ids // PANEL, :, ids % PANEL].flatten(1)
    pairs = panels[ids // PANEL, :, :, ids % PANEL]  # [N, in / 32, 4, 4]
    return torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)


def rows_of_groups(values: Tensor, ids: Tensor) -> Tensor:
    """Scales or offsets [N, groups] of rows `ids`."""
    return values[ids // PANEL, :, ids % PANEL]
