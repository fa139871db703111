"""AWQ (Lin et al., 2023, arXiv 2306.00978): protect the weights of large inputs by scaling.

A product is the same if input j is divided by s_j and column j of the weight multiplied by it:

    W x = (W diag(s)) (x / s)

Rounding errors are about as large as the step of a group, whatever the weight. A larger s_j makes
the error of column j smaller in proportion to its weights. AWQ searches, for inputs with mean
magnitude x_j and weights with mean relative magnitude w_j,

    s = x^r / w^(1 - r)   r in {0, 0.05, .., 0.95}     argmin || Q(W s) (X / s) - W X ||^2

The division by s is folded into the operation that produces x (`scaled_pairs.py`). The error
is tr(D H D^T) for the difference D = Q(W s) / s - W, so the search needs H = X X^T and no inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from minillm.lab.quantise.grid import Grid, round_to_grid
from minillm.lab.quantise.statistics import InputStatistics, output_error

STEPS = 20  # values of r
CLIP_STEPS, CLIP_RANGE = 10, 0.5  # ranges from 1 down to above 0.5


def awq_scales(weight: Tensor, statistics: InputStatistics, grid: Grid, group: int) -> Tensor:
    """The scales s [in] of all matrices that read the same input, stacked as [rows, in]."""

    def error(scales: Tensor) -> float:
        rounded = round_to_grid(weight * scales, grid, group).dense() / scales
        return float(output_error(rounded - weight, hessian))

    hessian, mean = statistics.hessian, statistics.mean
    candidates = [
        candidate(mean, relative_magnitude(weight, group), r / STEPS) for r in range(STEPS)
    ]
    return best(candidates, error)


def relative_magnitude(weight: Tensor, group: int) -> Tensor:
    """Mean over rows of |w| relative to the largest of its group, [in]."""
    groups = weight.abs().unflatten(1, (-1, group))
    return (groups / groups.amax(-1, keepdim=True).clamp(min=1e-6)).flatten(1).mean(0)


def candidate(mean: Tensor, magnitude: Tensor, ratio: float) -> Tensor:
    """The scales for an exponent r, centred so that their largest and smallest are reciprocal."""
    scales = (mean**ratio / (magnitude ** (1 - ratio) + 1e-4)).clamp(min=1e-4)
    return scales / (scales.max() * scales.min()).sqrt()


def best(candidates: list[Tensor], error: Callable[[Tensor], float]) -> Tensor:
    """The candidate with the smallest error. No scaling, s = 1, is always one of them."""
    return min([torch.ones_like(candidates[0]), *candidates], key=error)


def clipped(weight: Tensor, hessian: Tensor, grid: Grid, group: int) -> Tensor:
    """Limit the magnitudes of each group of a row to the range with the smallest output error.

    A smaller range has smaller steps for all weights, and cuts the largest. The error of a group
    counts its own inputs only: D_g H_gg D_g^T.
    """
    groups = weight.unflatten(1, (-1, group))  # [out, groups, g]
    blocks = torch.stack([
        hessian[i : i + group, i : i + group] for i in range(0, len(hessian), group)
    ])  # fmt: skip
    largest = groups.abs().amax(-1, keepdim=True)
    least, chosen = torch.full_like(largest, torch.inf), groups
    for step in range(CLIP_STEPS):
        limit = largest * (1 - step / CLIP_STEPS * CLIP_RANGE)
        cut = groups.clamp(-limit, limit)
        scale, zero = grid.fit(cut)
        rounded = scale[..., None] * (
            grid.codes(cut, scale[..., None], zero[..., None]) - zero[..., None]
        )
        difference = rounded - groups
        product = torch.einsum("ogi,gij->ogj", difference, blocks)
        error = (product * difference).sum(-1, keepdim=True)
        chosen = torch.where(error < least, cut, chosen)
        least = torch.minimum(error, least)
    return chosen.flatten(1)
