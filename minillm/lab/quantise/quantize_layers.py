"""Quantises a model layer by layer: record inputs, scale channels, round, and go on with the
outputs of the quantised layer.

Memory beside the model: one layer in float32, its Hessians, the activations of the calibration text
before one layer, and a KV cache of 8 windows.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.quantise.awq import awq_scales
from minillm.lab.quantise.calibration import Calibration, Recorded, layer_of, quantizable
from minillm.lab.quantise.grid import Grid
from minillm.lab.quantise.making import Made, quantize_parts
from minillm.lab.quantise.recipe import BLOCK, NF4_BLOCK, Recipe
from minillm.lab.quantise.scaled_pairs import scale_pairs
from minillm.lab.quantise.smoothquant import smooth_scales
from minillm.layers.linear_methods import CheckpointTensor, Matrix, PlainLinearMethod, frozen
from minillm.layers.norm import RMSNorm
from minillm.models.decoder import Block, Decoder
from minillm.quantization.methods import QuantizedMethod, install
from minillm.quantization.quantized import stacked
from minillm.quantization.rounding import GROUPS


@dataclass(frozen=True)
class LayerResult:
    """A quantised layer: its quantised matrices, and the other tensors of the checkpoint."""

    index: int
    made: list[Made]
    others: Mapping[str, Tensor]


def quantized_model(
    model: Decoder,
    recipe: Recipe,
    windows: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> list[Made]:
    """Quantise the layers of a loaded model in place; embedding and output matrix stay.

    Args:
        model: unquantised, as `load_model` returns it.
        windows: token ids [W, T] of a calibration text (`calibration_text.py`). Without a
            text, methods that need none measure the errors of weights instead of outputs.
        scale_dtype: the type of stored scales; None: float16 for groups, float32 for rows.

    Returns the quantised matrices with their errors.
    """
    results = tqdm(
        quantize_layers(model, recipe, windows, scale_dtype),
        desc=f"Quantising ({recipe.method})", unit="layer", total=len(model.layers), delay=2,
    )  # fmt: skip
    return [made for result in results for made in result.made]


@torch.no_grad()
def quantize_layers(
    model: Decoder,
    recipe: Recipe,
    windows: Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
    finished: int = 0,
) -> Iterator[LayerResult]:
    """Quantise a model in place, and yield each layer when it is done. The first `finished` layers
    are quantised already.

    Raises:
        ConfigError: the method needs a calibration text, or the model is quantised already.
        UnsupportedFeatureError: the groups do not divide a matrix.
    """
    group = group_size(model, recipe, finished)
    if recipe.calibrated and (windows is None or not windows.numel()):
        raise ConfigError(f"{recipe.method} needs a calibration text, and this one is empty.")
    if scale_dtype is None:
        scale_dtype = torch.float16 if recipe.grouped else torch.float32
    calibration = None if windows is None else Calibration(model, windows)
    for index in range(len(model.layers)):
        layer, result = layer_of(model, index), None
        cast(layer, torch.float32)
        if index >= finished:
            recorded = {} if calibration is None else calibration.record(layer)
            made, others = quantize_layer(layer, recipe, group, recorded, scale_dtype)
            result = LayerResult(index, made, {k: v.to(model.dtype) for k, v in others.items()})
        if calibration is not None:
            calibration.advance(layer)
        cast(layer, model.dtype)
        if result is not None:
            yield result


def quantize_layer(
    layer: Block, recipe: Recipe, group: int, recorded: Recorded, scale_dtype: torch.dtype
) -> tuple[list[Made], dict[str, Tensor]]:
    """Quantise a float32 layer in place. Returns its matrices and its other tensors."""
    if recipe.method == "smoothquant":
        scales_of = partial(smooth_scales, alpha=recipe.alpha)
        scale_pairs(layer, recorded, scales_of, only_norms=True)
    elif recipe.method == "awq":
        grid = Grid(recipe.bits, recipe.symmetric, scale_dtype)
        scale_pairs(
            layer, recorded, lambda w, s: awq_scales(w, s, grid, group or w.shape[1]), False
        )
    matrices = quantizable(layer)
    names = {f"{part.name}.weight" for matrix in matrices for part in matrix.parts}
    others = {
        tensor.name: tensor.target.clone()
        for tensor in checkpoint_tensors(layer)
        if tensor.name not in names
    }
    made = []
    for matrix in matrices:
        copies = matrix.copies or 1
        weights = matrix.weight.data.flatten(0, -2).chunk(copies)
        parts = [(part.name, len(part.rows)) for part in matrix.parts]
        share, mine = len(parts) // copies, []
        for copy, weight in enumerate(weights):
            given = recorded[matrix][copy] if matrix in recorded else None
            some = parts[copy * share : (copy + 1) * share]
            mine += quantize_parts(
                weight, some, recipe, group or weight.shape[1], given, scale_dtype
            )
        replace(matrix, mine)
        made += mine
    return made, others


def checkpoint_tensors(layer: Block) -> Iterator[CheckpointTensor]:
    """The tensors of a layer."""
    for module in layer.modules():
        if isinstance(module, Matrix | RMSNorm):
            yield from module.checkpoint_tensors()


def replace(matrix: Matrix, made: list[Made]) -> None:
    """Compute with quantised parts from now on. Experts with and without an input order are stored
    dense."""
    whole = stacked([rounding.quantized for rounding in made])
    if whole is not None:
        install(matrix, whole, torch.float32)
        return
    dense = torch.cat([rounding.quantized.dense() for rounding in made])
    matrix.weight = frozen(dense.view(matrix.shape))


def cast(layer: nn.Module, dtype: torch.dtype) -> None:
    """Compute a layer, or a model, in `dtype`. Codes and scales stay."""
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    for matrix in layer.modules():
        if isinstance(matrix, Matrix) and isinstance(matrix.method, QuantizedMethod):
            matrix.method.dtype = dtype


def group_size(model: Decoder, recipe: Recipe, finished: int = 0) -> int:
    """The number of inputs that share a scale in all matrices of the model; 0: whole rows.

    Raises:
        ConfigError: the model is quantised already.
        UnsupportedFeatureError: the groups do not divide a matrix.
    """
    matrices = [
        each for i in range(finished, len(model.layers)) for each in quantizable(layer_of(model, i))
    ]
    if any(not isinstance(matrix.method, PlainLinearMethod) for matrix in matrices):
        raise ConfigError("This model is quantised already; quantise the original checkpoint.")
    return common_group(recipe, {matrix.parts[0].name: matrix.in_features for matrix in matrices})


def common_group(recipe: Recipe, widths: Mapping[str, int]) -> int:
    """The group size for matrices with these numbers of inputs, by name; 0: whole rows."""
    wanted = {"nf4": NF4_BLOCK, "int8": -1, "smoothquant": -1}.get(recipe.method, recipe.group_size)
    if recipe.method == "fp8" and wanted is None:
        wanted = BLOCK
    if wanted == -1:
        return 0
    for size in GROUPS if wanted is None else (wanted,):
        misfits = [name for name, width in widths.items() if width % size]
        if not misfits:
            return size
    name = misfits[0]
    raise UnsupportedFeatureError(
        f"{name} has {widths[name]} inputs, which groups of {size} do not divide; choose a "
        f"group_size that divides {widths[name]}, or -1 for whole rows."
    )
