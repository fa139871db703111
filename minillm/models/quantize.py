"""Quantises the weights of a 16-bit checkpoint when it is loaded (`quantization="int8"`).

| name | linear layers and experts | output matrix |
|---|---|---|
| int8 | signed 8-bit codes, a scale per row | int8 |
| int4 | 4-bit codes with zero points, groups of 128 (or 64, 32) inputs | int8 |

Not quantised: norms, biases, routers, the matrix that MLA absorbs, and an embedding that is not the
output matrix. A row of an embedding is read once per token, so it costs little; routers are small
and decide discretely.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from minillm.layers.linear import Embedding
from minillm.layers.linear_methods import Matrix, PlainLinearMethod
from minillm.layers.mla import MLAttention
from minillm.layers.moe import Router
from minillm.models.decoder import Decoder
from minillm.quantization.methods import install
from minillm.quantization.quantized import Quantized
from minillm.quantization.rounding import group_of, round_asymmetric, round_symmetric


def round_int4(weight: Tensor) -> Quantized:
    """Asymmetric 4-bit codes in the largest groups that divide the rows."""
    return round_asymmetric(weight, 4, group_of(weight.shape[1]))


Rounding = Callable[[Tensor], Quantized]
ROUNDINGS: Mapping[str, Rounding] = MappingProxyType({"int8": round_symmetric, "int4": round_int4})


def rounded_matrices(model: Decoder, how: str) -> Iterator[tuple[Matrix, Rounding]]:
    """The matrices of a model that are quantised, each with its rounding."""
    skipped = {id(each.kv_b_proj) for each in model.modules() if isinstance(each, MLAttention)}
    for matrix in model.modules():
        if not isinstance(matrix, Matrix) or not isinstance(matrix.method, PlainLinearMethod):
            continue
        is_input = isinstance(matrix, Embedding) and not model.config.tie_word_embeddings
        if (
            isinstance(matrix, Router)
            or is_input
            or id(matrix) in skipped
            or not matrix.out_features
        ):
            continue
        is_output = matrix is model.lm_head or isinstance(matrix, Embedding)
        yield matrix, ROUNDINGS["int8" if is_output else how]


@torch.inference_mode()
def quantize_weights(model: Decoder, how: str) -> None:
    """Quantise a loaded model in place, a matrix at a time. A rank quantises its own part: where it
    holds some columns, scales and groups are those of its columns."""
    for matrix, rounding in list(rounded_matrices(model, how)):
        install(matrix, rounding(matrix.values().flatten(0, -2)), model.dtype)
