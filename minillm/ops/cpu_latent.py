"""Multi-head latent attention in C (`c/latent.c`), with all weights in panels."""

from dataclasses import dataclass

from torch import Tensor

from minillm.ops import cpu
from minillm.ops.cpu_quantized import MatrixParts


@dataclass(frozen=True)
class LatentWeights:
    """The tensors of one layer (`latent_weights` of latent.h).

    `q_a` and its norm are None if queries are projected directly. `keys` and `values` are the
    panels of W_uk, transposed, and W_uv of each head.
    """

    q_a: MatrixParts | None
    q_a_bias: Tensor | None
    q_a_norm: Tensor | None
    q: MatrixParts
    kv_a: MatrixParts
    kv_a_bias: Tensor | None
    kv_a_norm: Tensor
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class LatentShape:
    """The common shape of all layers (`latent_shape` of latent.h).

    The numbers of a head are those without rotation (`nope`), those with rotation (`rope`), and
    those of a value.
    """

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
        whole = not any(size % cpu.PANEL_STEP for size in sizes) and self.rope % 2 == 0
        within = self.rope <= cpu.MOST_HEAD_DIM
        return whole and within and cpu.fits_vectors(self.heads, self.rank + self.rope, self.rank)


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
    if x.stride(2) != 1:
        x = x.contiguous()
    out = x.new_empty(count, heads, out_features)
    where = x.data_ptr(), x.stride(0), x.stride(1), panels.data_ptr(), out.data_ptr()
    cpu.ready(x.dtype).head_linear(*where, count, heads, size, out_features)
    return out
