"""Expert parallelism: each rank of a stage has whole experts (Lepikhin et al., 2020, 3.1).

    rank 0   experts 0 .. 3    tokens that chose one of them --+
                                                               +-- the layer's sum --> x
    rank 1   experts 4 .. 7    tokens that chose one of them --+

The ranks split attention by heads, so each has all tokens and routes them alike. A rank computes
what was chosen of its own experts, and the sum that tensor parallelism needs anyway brings the
parts together: no token is sent. A product keeps its width; the ranks' work follows the choices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from minillm.layers.linear_methods import Matrix
from minillm.layers.moe import Experts


def share_experts(experts: Experts, held: Sequence[int]) -> None:
    """Keep a rank's experts, whole and in this order, of a layer that has no memory yet."""
    for matrix in (experts.gate_up, experts.down):
        keep_copies(matrix, held)


def keep_copies(matrix: Matrix, held: Sequence[int]) -> None:
    """Of a stack of matrices those that are held."""
    each = len(matrix.parts) // (matrix.copies or 1)  # gate and up, or down alone
    starts = [expert * each for expert in held]
    matrix.parts = tuple(part for at in starts for part in matrix.parts[at : at + each])
    matrix.copies = len(held)


class OwnExperts(nn.Module):
    """Some of a layer's experts: they compute what was chosen of them, the rest is 0."""

    def __init__(self, experts: Experts, held: range):
        super().__init__()
        self.experts, self.held = experts, held

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[N, d], [N, k], [N, k] -> [N, d], a part of a sum over ranks"""
        own = ids - self.held.start
        rows, choices = torch.where((own >= 0) & (own < len(self.held)))
        out = torch.zeros_like(x)
        if not len(rows):
            return out
        chosen = weights[rows, choices, None], own[rows, choices, None]
        return out.index_add(0, rows, self.experts(x[rows], *chosen))
