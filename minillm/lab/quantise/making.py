"""Quantises one matrix by a recipe."""

from dataclasses import dataclass

import torch
from torch import Tensor

from minillm.lab.quantise.awq import clipped
from minillm.lab.quantise.fp8 import round_fp8
from minillm.lab.quantise.gptq import GPTQOptions, gptq
from minillm.lab.quantise.grid import Grid, round_to_grid
from minillm.lab.quantise.nf4 import NestedScales, nf4
from minillm.lab.quantise.recipe import BLOCK, Recipe
from minillm.lab.quantise.statistics import InputStatistics, output_error
from minillm.layers.linear_methods import Matrix
from minillm.quantization.quantized import Quantized
from minillm.quantization.rounding import round_symmetric


@dataclass(frozen=True)
class Made:
    """A quantised checkpoint matrix.

    `error` is the root mean square error relative to the values: of outputs on the calibration
    text if there is one, else of weights. `nested` is how NF4 stores its scales.
    """

    name: str
    quantized: Quantized
    error: float
    nested: NestedScales | None = None


def quantize_parts(
    weight: Tensor,
    names: list[tuple[str, int]],
    recipe: Recipe,
    group: int,
    statistics: InputStatistics | None,
    scale_dtype: torch.dtype,
) -> list[Made]:
    """Quantise stacked checkpoint matrices.

    Args:
        weight: float32 [rows, in].
        names: name and number of rows of each matrix.
        group: inputs that share a scale.
        statistics: of the inputs; required by calibrated methods.
        scale_dtype: the type of stored scales.
    """
    grid, rows = Grid(recipe.bits, recipe.symmetric, scale_dtype), [count for _, count in names]
    whole: Quantized | None = None
    if recipe.method == "gptq" and enough(statistics, weight.shape[1]):
        options = GPTQOptions(recipe.damp, recipe.act_order, recipe.static_groups)
        whole = gptq(weight, statistics.hessian, grid, group, options)  # type: ignore[union-attr]
    made, start = [], 0
    for (name, count), part in zip(names, weight.split(rows), strict=True):
        nested = None
        if whole is not None:
            rounded = whole.rows(slice(start, start + count))
        elif recipe.method == "nf4":
            rounded, nested = nf4(part, recipe.double)
        elif recipe.method == "fp8":
            rounded = round_fp8(part, scale_dtype, blocks=group == BLOCK)
        elif recipe.grouped:
            rounded = round_to_grid(
                prepared(name, part, recipe, grid, group, statistics), grid, group
            )
        else:
            rounded = round_symmetric(part, dtype=scale_dtype)
        made.append(Made(name, rounded, relative_error(part, rounded, statistics), nested))
        start += count
    return made


def eight_bit_head(matrix: Matrix, scale_dtype: torch.dtype) -> Made:
    """The output matrix in 8 bits, a scale per row."""
    weight = matrix.values().float()
    rounded = round_symmetric(weight, dtype=scale_dtype)
    return Made(matrix.parts[0].name, rounded, relative_error(weight, rounded, None))


def enough(statistics: InputStatistics | None, in_features: int) -> bool:
    """Whether there are as many inputs as their Hessian has rows. An expert that few tokens reach
    is rounded to nearest instead."""
    return statistics is not None and statistics.count >= in_features


def prepared(
    name: str,
    weight: Tensor,
    recipe: Recipe,
    grid: Grid,
    group: int,
    statistics: InputStatistics | None,
) -> Tensor:
    """The weight before rounding: AWQ clips all but queries and keys, whose products are sensitive
    to outliers."""
    if recipe.method != "awq" or not recipe.clip or not enough(statistics, 1):
        return weight
    if name.rsplit(".", 1)[-1] in ("q_proj", "k_proj", "q_a_proj", "q_b_proj"):
        return weight
    return clipped(weight, statistics.hessian, grid, group)  # type: ignore[union-attr]


def relative_error(weight: Tensor, rounded: Quantized, statistics: InputStatistics | None) -> float:
    """The error of `Made`."""
    difference = rounded.dense() - weight
    if statistics is None or not statistics.count:
        return float(difference.norm() / weight.norm().clamp(min=1e-30))
    hessian = statistics.hessian
    ratio = output_error(difference, hessian) / output_error(weight, hessian).clamp(min=1e-30)
    return float(ratio.clamp(min=0).sqrt())
