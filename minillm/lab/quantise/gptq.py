"""GPTQ (Frantar et al., 2022, arXiv 2210.17323, algorithm 1): round column by column, and correct
the columns that are not rounded yet.

The inputs X of a calibration text measure the error of a rounded row w': ||(w - w') X||^2, which is
(w - w') H (w - w')^T / 2 with H = 2 X X^T. After column i is rounded, the best correction of the
later columns is (optimal brain surgeon, Hassibi and Stork, 1993)

    e = (w_i - w'_i) / U_ii,    w_j -= e U_ij  for j > i

with the upper Cholesky factor U of H^-1 = U^T U, whose rows are what all steps need.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.errors import ConfigError
from minillm.lab.quantise.grid import Grid
from minillm.quantization.quantized import Quantized


@dataclass(frozen=True)
class GPTQOptions:
    """How GPTQ runs.

    Attributes:
        damp: this share of the mean diagonal of H is added to its diagonal.
        act_order: columns with the largest diagonal of H first. Groups follow this order.
        static_groups: scales come from the original weights, so that act order keeps the groups.
        block: columns whose corrections reach later columns in one product.
    """

    damp: float = 0.01
    act_order: bool = False
    static_groups: bool = False
    block: int = 128


def gptq(
    weight: Tensor, hessian: Tensor, grid: Grid, group: int, options: GPTQOptions | None = None
) -> Quantized:
    """Quantise [out, in] for inputs with this `hessian` [in, in], in groups of `group` inputs.

    Raises:
        ConfigError: H is not positive definite, because `damp` is too small.
    """
    options = options or GPTQOptions()
    weight, hessian, columns = weight.clone(), hessian.clone(), weight.shape[1]
    dead = hessian.diagonal() == 0  # inputs that are always 0: their weights have no effect
    hessian.diagonal()[dead] = 1
    weight[:, dead] = 0
    order = input_order(hessian, options.act_order)  # position -> input
    original = weight
    weight, hessian = weight[:, order], hessian[order][:, order]
    upper = inverse_factor(hessian, options.damp)
    groups = (order if options.static_groups else torch.arange(columns)) // group  # by position
    fixed = grid.fit(original.unflatten(1, (-1, group))) if options.static_groups else None
    scales, zeros = fixed or (weight.new_empty(len(weight), columns // group) for _ in range(2))
    codes, block = torch.empty_like(weight), block_size(options.block, group)
    for start in range(0, columns, block):
        end = min(start + block, columns)
        errors = weight.new_zeros(len(weight), end - start)
        for i in range(start, end):
            g = int(groups[i])
            if fixed is None and i % group == 0:  # a new group: its scale from corrected weights
                scales[:, g], zeros[:, g] = grid.fit(weight[:, i : i + group])
            scale, zero = scales[:, g], zeros[:, g]
            codes[:, i] = grid.codes(weight[:, i], scale, zero)
            rounded = scale * (codes[:, i] - zero)
            error = (weight[:, i] - rounded) / upper[i, i]
            weight[:, i:end] -= torch.outer(error, upper[i, i:end])
            errors[:, i - start] = error
        weight[:, end:] -= errors @ upper[start:end, end:]
    if options.static_groups or group == columns:  # groups do not depend on the order
        return grid.quantized(codes[:, order.argsort()], scales, zeros)
    return grid.quantized(codes, scales, zeros, order if options.act_order else None)


def input_order(hessian: Tensor, act_order: bool) -> Tensor:
    """The order in which inputs are rounded, [in]."""
    if act_order:
        return hessian.diagonal().argsort(descending=True, stable=True)
    return torch.arange(len(hessian), device=hessian.device)


def inverse_factor(hessian: Tensor, damp: float) -> Tensor:
    """The upper Cholesky factor U of the inverse of the damped Hessian: H^-1 = U^T U."""
    damped = hessian.double()
    damped.diagonal().add_(damp * float(damped.diagonal().mean()))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed) or not bool(torch.isfinite(lower).all()):
        raise ConfigError(
            f"GPTQ cannot factor the Hessian of the calibration inputs with --damp {damp}; use a "
            "larger --damp (0.01 is usual) or more calibration text."
        )
    inverse = torch.cholesky_inverse(lower)
    return torch.linalg.cholesky(inverse, upper=True).to(hessian.dtype)


def block_size(wanted: int, group: int) -> int:
    """The number of columns of a block: a group must begin with all earlier corrections applied, so
    blocks hold whole groups, or groups hold whole blocks."""
    return wanted - wanted % group if group <= wanted else math.gcd(group, wanted)
