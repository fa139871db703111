"""Quantised matrices in the layouts that the Triton kernels read (`minillm_kernels.quantized`).

    4 bits, groups of a multiple of 32    codes interleaved, x in 16 bits       int4_linear
    e4m3; int8                            x in 16 bits                          scaled_linear

x keeps 16 bits, because one scale for a row of x in 8 bits costs a real model with outlying
channels up to 5% of perplexity.

Everything else (NF4, zero points of 8 bits, other groups) stays as it is, and is made dense for
each product. All operations have shapes that do not depend on values, so steps can be captured as
CUDA graphs. Of a stack of experts as many are made dense as a step has choices, and at most all.
"""

from typing import Any

import torch
from torch import Tensor, nn

from minillm import ops
from minillm.layers.linear import Embedding, Linear
from minillm.layers.linear_methods import Matrix
from minillm.ops import dispatch
from minillm.quantization.methods import QuantizedMethod, some_copies
from minillm.quantization.quantized import Quantized, integer_codes, split_bytes
from minillm_kernels.quantized_reference import by_column, deinterleave, interleave

FLOAT8 = torch.float8_e4m3fn
SCALE_ROWS = 128  # rows of a block of scales in FP8 checkpoints
LEAST_GROUP = 32


class KernelQuantizedMethod(QuantizedMethod):
    """A quantised matrix [out, in] in a kernel's layout: buffers `codes`, `scales` [groups, out]
    (or by blocks of `scale_rows` rows), `zeros` or `minima` [groups, out], and `order`."""

    def __init__(
        self,
        dtype: torch.dtype,
        names: tuple[str, ...],
        scale_rows: int = 1,
        threshold: float = 0.0,
    ):
        super().__init__(dtype, names, threshold)
        self.scale_rows = scale_rows

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        if not dispatch.uses_kernels(x):
            return super().apply(matrix, x, bias)
        from minillm_kernels import quantized

        parts: dict[str, Any] = {name: matrix.get_buffer(name) for name in self.names}
        if (order := parts.pop("order", None)) is not None:
            x = x.index_select(1, order)
        if parts["codes"].dtype == torch.uint8:
            return quantized.int4_linear(x, **parts, bias=bias)
        block = self.scale_rows, matrix.in_features // len(parts["scales"])
        return quantized.scaled_linear(x, **parts, bias=bias, block=block)

    def quantized(self, matrix: Matrix) -> Quantized:
        """The matrix in the common layout, a copy."""
        ids = torch.arange(matrix.out_features, device=matrix.get_buffer("codes").device)
        return self.rows(matrix, ids)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        return self.rows(matrix, ids).dense(self.dtype)

    def rows(self, matrix: Matrix, ids: Tensor) -> Quantized:
        """Some rows in the common layout."""
        parts = {name: matrix.get_buffer(name) for name in self.names}
        codes = parts["codes"][ids]
        found = {"codes": codes, "scales": parts["scales"].T[ids // self.scale_rows]}
        if codes.dtype == torch.uint8:
            found["codes"] = integer_codes(deinterleave(codes), 4)
        found |= {name: parts[name].T[ids] for name in ("zeros", "minima") if name in parts}
        return Quantized(**found, order=parts.get("order"))


class StackedQuantizedMethod(QuantizedMethod):
    """Quantised experts [E, out, in], with shapes that depend on the number of choices only."""

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """MoE layer as `LinearMethod.experts`: the experts of all choices are made dense, or all
        experts if there are fewer."""
        count, copies = ids.numel(), gate_up.shape[0]
        chosen, places = torch.arange(copies, device=ids.device), ids
        if count < copies:
            chosen = ids.flatten()
            places = torch.arange(count, device=ids.device, dtype=ids.dtype).view(ids.shape)
        run = ops.tiled_moe_experts if tiled else ops.moe_experts
        return run(x, some_copies(gate_up, chosen), some_copies(down, chosen), weights, places)


@torch.inference_mode()
def pack_for_kernels(model: nn.Module, device: torch.device) -> int:
    """Put the quantised matrices of a model into the layouts of the kernels, if the device has
    them; returns the number of matrices. Matrices of which more than products is needed (routers,
    MLA's `kv_b_proj`) stay as they are."""
    if dispatch.backend_of(device).name != "triton":
        return 0
    count = 0
    for matrix in model.modules():
        if not isinstance(matrix, Matrix) or type(matrix.method) is not QuantizedMethod:
            continue
        if matrix.copies is not None:
            matrix.method = StackedQuantizedMethod(matrix.method.dtype, matrix.method.names)
        elif isinstance(matrix, Linear | Embedding) and not matrix.is_absorbed:
            count += repack(matrix, matrix.method)
    return count


def repack(matrix: Matrix, method: QuantizedMethod) -> bool:
    """Put a matrix into a kernel's layout; False if no kernel reads its format."""
    weights = method.quantized(matrix)
    if not is_supported(weights):
        return False
    names, scale_rows = tuple(weights.parts()), 1
    for name in ("scales", "zeros", "minima"):
        if name in names:
            setattr(matrix, name, getattr(weights, name).T.contiguous())
    if weights.bits == 4:
        matrix.codes = interleave(split_bytes(weights.codes))
    elif weights.scales.shape[1] > 1 and (blocks := scales_of_blocks(weights.scales)) is not None:
        matrix.scales, scale_rows = blocks, SCALE_ROWS
    matrix.method = KernelQuantizedMethod(method.dtype, names, scale_rows, method.threshold)
    return True


def is_supported(weights: Quantized) -> bool:
    """Whether a kernel reads this format."""
    if weights.table is not None or not weights.codes.numel():
        return False
    if weights.bits == 4:
        return weights.group_size % LEAST_GROUP == 0
    whole = weights.zeros is None and weights.minima is None
    return whole and (weights.scales.shape[1] == 1 or weights.group_size % LEAST_GROUP == 0)


def scales_of_blocks(scales: Tensor) -> Tensor | None:
    """Scales [out, groups] as [groups, blocks] if the scales of 128 rows are equal."""
    blocks = scales[::SCALE_ROWS].T.contiguous()
    shape = scales.shape[0], scales.shape[1]
    return blocks if torch.equal(by_column(blocks, SCALE_ROWS, 1, shape), scales) else None
