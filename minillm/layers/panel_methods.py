"""Storage in panels of weights that are not plain products: stacked experts, and the matrix that
MLA absorbs into its queries and outputs."""

import torch
from torch import Tensor, nn

from minillm.layers.linear_methods import LinearMethod, Matrix, PanelLinearMethod, frozen
from minillm.ops import cpu
from minillm.ops.cpu_experts import panel_experts
from minillm.ops.cpu_latent import head_linear
from minillm.ops.cpu_quantized import MatrixParts


class PanelExpertsMethod(PanelLinearMethod):
    """Stacked experts [E, out, in], each in panels, one after the other."""

    def arranged(self, weight: Tensor) -> Tensor:
        """[E, out, in] -> [E x out, in]; `out` is a multiple of 32, so panels are not shared."""
        return weight.flatten(0, 1)

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """x [N, d], experts `ids` [N, k] and their `weights` [N, k] -> [N, d]."""
        parts = MatrixParts(gate_up.weight), MatrixParts(down.weight)
        return panel_experts(x, *parts, weights, ids)


class PanelHeadsMethod(LinearMethod):
    """`kv_b_proj` of MLA in panels, W_uk transposed (`weight`) and W_uv (`value_panels`) of every
    head: the same size as the plain layout."""

    def __init__(self, rank: int):
        self.rank = rank

    def absorb(self, matrix: Matrix, q: Tensor) -> Tensor:
        """W_uk^T q: [N, H, Dn] -> [N, H, R]"""
        return head_linear(q, matrix.weight, self.rank)

    def expand(self, matrix: Matrix, latents: Tensor, value_dim: int) -> Tensor:
        """W_uv c: [N, H, R] -> [N, H, Dv]"""
        return head_linear(latents, matrix.get_parameter("value_panels"), value_dim)


def pack_heads(matrix: Matrix, heads: int, nope: int, value_dim: int) -> None:
    """Pack `kv_b_proj` [H x (Dn + Dv), R] by heads; the sizes are multiples of 32."""
    rank = matrix.in_features
    keys, values = matrix.values().view(heads, -1, rank).split((nope, value_dim), dim=1)
    parts = keys.transpose(1, 2).reshape(heads * rank, nope), values.reshape(-1, rank)
    for name in [name for name, _ in matrix.named_buffers(recurse=False)]:
        delattr(matrix, name)  # of a quantised matrix
    matrix.method = PanelHeadsMethod(rank)
    for name, part in zip(("weight", "value_panels"), parts, strict=True):
        matrix.register_parameter(name, in_panels(part))


def in_panels(weight: Tensor) -> nn.Parameter:
    """A weight [out, in] in panels of its own."""
    panels = torch.empty(cpu.panels_shape(*weight.shape), dtype=weight.dtype)
    cpu.pack_panels(weight, panels)
    return frozen(panels)
