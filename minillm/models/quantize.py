"""Quantises the weights of a 16-bit checkpoint when it is loaded (`quantization="int8"`).

| name | linear layers and experts | output matrix |
|---|---|---|
| int8 | signed 8-bit codes, groups of 32 inputs | int8 |
| int4 | 4-bit codes with minima, groups of 32 inputs | int8 |

Not quantised: norms, biases, routers, the matrix that MLA absorbs, and an embedding that is not the
output matrix. A row of an embedding is read once per token, so it costs little; routers are small
and decide discretely.

A matrix is quantised as soon as all its rows are read, so peak memory is the quantised model and
one layer. A tied embedding waits until all files are read, because the loader compares it with an
output matrix that is stored, too; so do random weights, which are drawn in one sequence.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from minillm.layers.linear import Embedding
from minillm.layers.linear_methods import (
    CheckpointTensor,
    Matrix,
    PlainLinearMethod,
    WeightSlice,
    load_plain,
)
from minillm.layers.moe import Router
from minillm.models.decoder import Decoder
from minillm.ops import c_library
from minillm.quantization.methods import install
from minillm.quantization.quantized import Quantized, stacked
from minillm.quantization.rounding import round_symmetric, round_with_minima


def round_int8(weight: Tensor) -> Quantized:
    """Signed 8-bit codes. On a real model, groups of 32 have a quarter of the KL of a scale per
    row, for 6% more bytes; rows that they do not divide have one scale."""
    if weight.shape[1] % GROUP:
        return round_symmetric(weight)
    return round_symmetric(weight, 8, GROUP, torch.float16)


GROUP = 32  # inputs that share a scale
PIECE = 1 << 20  # weights that are rounded at once; rounding needs several float32 copies
Rounding = Callable[[Tensor], Quantized]
ROUNDINGS: Mapping[str, Rounding] = {
    "int8": round_int8,
    "int4": partial(round_with_minima, group=GROUP),
}


def rounded_matrices(model: Decoder, how: str) -> Iterator[tuple[Matrix, Rounding]]:
    """The matrices of a model that are quantised, each with its rounding."""
    for matrix in model.modules():
        if not isinstance(matrix, Matrix) or not isinstance(matrix.method, PlainLinearMethod):
            continue
        is_input = isinstance(matrix, Embedding) and not model.config.tie_word_embeddings
        is_special = isinstance(matrix, Router) or matrix.is_absorbed
        if is_input or is_special or not matrix.out_features:
            continue
        is_output = matrix is model.lm_head or isinstance(matrix, Embedding)
        yield matrix, ROUNDINGS["int8" if is_output else how]


class RoundedWhileReading(PlainLinearMethod):
    """A matrix without memory until its first rows are read, and quantised after its last ones."""

    def __init__(self, rounding: Rounding):
        self.rounding, self.missing = rounding, 0
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def create(self, matrix: Matrix, dtype: torch.dtype, device: torch.device | str) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self.missing = matrix.out_features

    def checkpoint_tensors(
        self, matrix: Matrix, part: WeightSlice, start: int
    ) -> Iterator[CheckpointTensor]:
        rows = torch.empty(part.slice.held, dtype=self.dtype, device="meta")
        store = partial(self._store, matrix, start)
        yield CheckpointTensor(f"{part.name}.weight", rows, part.slice, store)

    def _store(self, matrix: Matrix, start: int, place: CheckpointTensor, tensor: Tensor) -> None:
        if matrix.weight is None:
            super().create(matrix, self.dtype, self.device)
        rows = matrix.weight.data.flatten(0, -2)[start : start + len(place.target)]
        load_plain(replace(place, target=rows), tensor)
        self.missing -= len(rows)
        if not self.missing:
            round_matrix(matrix, self.rounding, self.dtype)


def quantize_while_reading(model: Decoder, how: str) -> None:
    """Make the matrices of a model that is not allocated yet quantise themselves while it is
    loaded; `quantize_weights` quantises the others afterwards."""
    for matrix, rounding in list(rounded_matrices(model, how)):
        if not isinstance(matrix, Embedding):
            matrix.method = RoundedWhileReading(rounding)


@torch.inference_mode()
def quantize_weights(model: Decoder, how: str) -> None:
    """Quantise a loaded model in place, a matrix at a time. A rank quantises its own part: where it
    holds some columns, scales and groups are those of its columns."""
    for matrix, rounding in list(rounded_matrices(model, how)):
        round_matrix(matrix, rounding, model.dtype)


@torch.inference_mode()
def round_matrix(matrix: Matrix, rounding: Rounding, dtype: torch.dtype) -> None:
    """Quantise a loaded matrix in place, some rows at a time: rows do not depend on each other."""
    rows = matrix.values().flatten(0, -2).split(max(1, PIECE // matrix.in_features))
    install(matrix, cast(Quantized, stacked([rounding(row) for row in rows])), dtype)
    del rows
    c_library.return_freed_memory()
