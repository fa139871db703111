"""Multi-head latent attention in C (`c/latent.c`), with all weights in panels."""

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import astuple, dataclass, fields

import torch
from torch import Tensor

from minillm.ops import cpu
from minillm.ops.c_library import library


@dataclass(frozen=True)
class LatentWeights:
    """The tensors of one layer. `q_a` and its norm are None if queries are projected directly;
    `keys` and `values` are the panels of W_uk, transposed, and W_uv of each head."""

    q_a: Tensor | None
    q_a_bias: Tensor | None
    q_a_norm: Tensor | None
    q: Tensor
    kv_a: Tensor
    kv_a_bias: Tensor | None
    kv_a_norm: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class LatentShape:
    """The common shape of all layers. The numbers of a head are those without rotation (`nope`),
    those with rotation (`rope`), and those of a value."""

    heads: int
    rank: int
    nope: int
    rope: int
    value: int
    q_rank: int
    eps: float

    @property
    def fits(self) -> bool:
        """Whether the C functions support these sizes."""
        sizes = self.rank, self.nope, self.value, self.q_rank
        whole = not any(each % cpu.PANEL_STEP for each in sizes) and self.rope % 2 == 0
        within = self.rope <= cpu.MOST_HEAD_DIM
        return whole and within and cpu.fits_vectors(self.heads, self.rank + self.rope, self.rank)


class WeightAddresses(Structure):
    """`latent_weights` of latent.h."""

    _fields_ = tuple((each.name, c_void_p) for each in fields(LatentWeights))


class ShapeNumbers(Structure):
    """`latent_shape` of latent.h."""

    _fields_ = (
        *((each.name, c_int64) for each in fields(LatentShape)[:-1]),
        ("eps", c_float),
    )


def addresses(weights: LatentWeights) -> WeightAddresses:
    """The addresses of the tensors, which the caller keeps alive."""
    tensors = [getattr(weights, each.name) for each in fields(weights)]
    return WeightAddresses(*(None if each is None else each.data_ptr() for each in tensors))


def numbers(shape: LatentShape) -> ShapeNumbers:
    """The shape for C."""
    return ShapeNumbers(*astuple(shape))


def memory_bytes(dtype: torch.dtype, shape: ShapeNumbers, count: int) -> int:
    """Bytes of memory for `count` tokens."""
    run = library(dict(cpu.ELEMENTS)[dtype]).latent_memory  # type: ignore[union-attr]
    run.restype, run.argtypes = c_int64, (POINTER(ShapeNumbers), c_int64)
    return run(byref(shape), count)


def head_linear(x: Tensor, panels: Tensor, out_features: int) -> Tensor:
    """A product of its own for each head: x [N, H, in] and panels of [H x out, in] -> [N, H, out].
    Rows and heads of x may have any strides."""
    count, heads, size = x.shape
    due = cpu.panels_shape(heads * out_features, size)
    if panels.shape != due or x.dtype != panels.dtype or out_features % cpu.PANEL_STEP:
        raise ValueError(
            f"x is {list(x.shape)}, {x.dtype}, which does not fit panels {list(panels.shape)}, "
            f"{panels.dtype}."
        )
    cpu.ready(x.dtype)
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(count, heads, out_features)
    run = library(dict(cpu.ELEMENTS)[x.dtype]).head_linear  # type: ignore[union-attr]
    run.restype = None
    run.argtypes = c_void_p, c_int64, c_int64, c_void_p, c_void_p, *[c_int64] * 4
    where = x.data_ptr(), x.stride(0), x.stride(1), panels.data_ptr(), out.data_ptr()
    run(*where, count, heads, size, out_features)
    return out
