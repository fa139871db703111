"""Mixture-of-experts layers in C (`c/experts.c`, `c/routing.c`), with all weights in panels."""

from ctypes import byref
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.cpu_quantized import MatrixParts, inputs_of
from minillm.ops.cpu_structures import filled

MOST_EXPERTS = 4096  # as in routing.c, which has numbers for each on the stack


@dataclass(frozen=True)
class ExpertWeights:
    """The tensors of one layer (`expert_weights` of experts.h).

    `shared_*` is the MLP of the shared experts. The router is None if the caller has chosen the
    experts.
    """

    router: Tensor | None
    bias: Tensor | None
    gate_up: MatrixParts
    down: MatrixParts
    shared_gate_up: MatrixParts | None = None
    shared_gate_up_bias: Tensor | None = None
    shared_down: MatrixParts | None = None
    shared_down_bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertShape:
    """The common shape of all mixture-of-experts layers, and how the router chooses
    (`expert_shape` of experts.h)."""

    hidden: int
    experts: int
    chosen: int
    size: int
    shared_size: int = 0
    sigmoid: bool = False
    normalize: bool = True
    groups: int = 1
    top_groups: int = 1
    best_two: bool = False
    factor: float = 1.0

    @property
    def fits(self) -> bool:
        """Whether the C functions support these sizes."""
        sizes = self.hidden, self.size, self.shared_size
        return self.experts <= MOST_EXPERTS and not any(size % cpu.PANEL_STEP for size in sizes)


def panel_experts(
    x: Tensor, gate_up: MatrixParts, down: MatrixParts, weights: Tensor, ids: Tensor
) -> Tensor:
    """The weighted sum of each token's chosen experts, `reference.moe_experts` with panels.

    x [N, d], weights and ids [N, k]; gate_up [E x 2 I, d] and down [E x d, I] in panels, plain or
    quantised -> [N, d].
    """
    hidden, size = inputs_of(gate_up), inputs_of(down)
    experts = len(down.panels) * 32 // hidden
    shape = ExpertShape(hidden, experts, ids.shape[1], size)
    plain = {matrix.panels.dtype for matrix in (gate_up, down) if matrix.scales is None}
    whole = len(gate_up.panels) * 32 == 2 * experts * size
    if x.shape[1:] != (hidden,) or not whole or plain - {x.dtype}:
        raise ValueError(
            f"x is {list(x.shape)}, {x.dtype}, which does not fit the experts' panels "
            f"{list(gate_up.panels.shape)} and {list(down.panels.shape)}, {gate_up.panels.dtype}."
        )
    if weights.shape != ids.shape or len(ids) != len(x):
        raise ValueError(
            f"ids are {list(ids.shape)} and weights {list(weights.shape)}; both must be "
            f"[{len(x)}, k]."
        )
    x, ids, weights = x.contiguous(), ids.long().contiguous(), weights.float().contiguous()
    given, out, c = filled(shape), torch.empty_like(x), cpu.ready(x.dtype)
    memory = torch.empty(c.expert_memory(byref(given), len(x)), dtype=torch.uint8)
    tensors = filled(ExpertWeights(None, None, gate_up, down))
    where = x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr()
    if c.chosen_experts(byref(tensors), byref(given), *where, len(x), memory.data_ptr()):
        raise IndexError(f"An expert id is outside of 0 to {experts - 1}.")
    return out
