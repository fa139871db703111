"""Benchmarks of products of few rows: the layers of a model in decode.

The products of a whole layer are measured with norms and SwiGLU in them, and between cuBLAS.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels import fused, gemv
from minillm_kernels.bench import case

EPS = 1e-6


@dataclass(frozen=True)
class Size(case.Size):
    """A product of a model, and the rows of a step."""

    model: str
    num_rows: int
    num_out: int
    size: int
    norm: bool = False
    batch_invariant: bool = False

    @property
    def num_bytes(self) -> int:
        """Of the weight, x and y in bfloat16, each once."""
        return 2 * (self.num_out * self.size + self.num_rows * (self.size + self.num_out))

    @property
    def num_flops(self) -> int:
        """Of the product."""
        return 2 * self.num_rows * self.num_out * self.size

    @property
    def name(self) -> str:
        """What is computed."""
        what = "norm_linear" if self.norm else "linear"
        shape = f"M={self.num_rows} {self.size}->{self.num_out}"
        return f"{what} {self.model} {shape}" + " batch-invariant" * self.batch_invariant

    def make(self, device: str, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, the norm's weight and the weight: numbers of a size that keeps results near 1."""
        x, weight = (
            torch.randn(rows, self.size, dtype=torch.bfloat16, device=device)
            for rows in (self.num_rows, self.num_out)
        )
        return x, torch.ones_like(x[0]), weight.mul_(self.size**-0.5)

    def run(self, inputs: tuple[Tensor, Tensor, Tensor]) -> object:
        """The kernel."""
        x, norm, weight = inputs
        options: Any = {"batch_invariant": self.batch_invariant}
        if not self.norm:
            return gemv.linear(x, weight, **options)
        return gemv.norm_linear(x, None, norm, EPS, weight, **options)

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """cuBLAS, after torch's own norm."""

        def by_torch(inputs: tuple[Tensor, Tensor, Tensor]) -> object:
            x, norm, weight = inputs
            return F.linear(F.rms_norm(x, (self.size,), norm, EPS) if self.norm else x, weight)

        return {"torch": by_torch}


# ---- layers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer(case.Size):
    """The four products of a layer, with norms, residual additions and SwiGLU, without attention: a
    part of qkv stands for its output. `widths` are those of the residual stream, of qkv, of the
    output of attention, and of the MLP."""

    model: str
    num_rows: int
    widths: tuple[int, int, int, int]

    @property
    def name(self) -> str:
        """What is computed."""
        return f"layer {self.model} M={self.num_rows}"

    @property
    def num_bytes(self) -> int:
        """Of the weights in bfloat16."""
        width, qkv, heads, units = self.widths
        return 2 * width * (qkv + heads + 3 * units)

    @property
    def num_flops(self) -> int:
        """Of the products."""
        return self.num_rows * self.num_bytes

    def make(self, device: str, number: int) -> tuple[Tensor, ...]:
        """Rows, the norm's weight, and weights that keep results near 1."""
        (width, qkv, heads, units), rows = self.widths, self.num_rows
        shapes = (rows, width), (rows, width), (1, width)
        weights = (qkv, width), (width, heads), (2 * units, width), (width, units)
        x, residual, norm, *others = (
            torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (*shapes, *weights)
        )
        return x, residual, norm[0], *(weight.mul_(weight.shape[1] ** -0.5) for weight in others)

    def run(self, inputs: tuple[Tensor, ...]) -> object:
        """Four launches."""
        return run_layer(gemv.linear, norm_linear, inputs)

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """The products of the engine with more than 8 rows, everything apart, and dependent
        launches."""
        dependent = partial(gemv.linear, dependent=True), partial(norm_linear, dependent=True)
        return {
            "o and down by cuBLAS": partial(run_layer, F.linear, norm_linear),
            "cuBLAS, the rest apart": partial(run_layer, F.linear, apart),
            "dependent launches": partial(run_layer, *dependent),
        }


def run_layer(product: Any, normed: Any, inputs: tuple[Tensor, ...]) -> object:
    """One layer: `product` of o and down, `normed` of qkv and gate_up."""
    x, residual, norm, qkv, o, gate_up, down = inputs
    heads, residual = normed(x, residual, norm, qkv)
    x = product(heads[:, : o.shape[1]], o)
    gated, residual = normed(x, residual, norm, gate_up, gated=True)
    return product(gated, down), residual


def norm_linear(x: Tensor, residual: Tensor, norm: Tensor, weight: Tensor, **more: bool) -> Any:
    """Of the kernel."""
    return gemv.norm_linear(x, residual, norm, EPS, weight, **more)  # type: ignore[arg-type]


def apart(
    x: Tensor, residual: Tensor, norm: Tensor, weight: Tensor, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in two or three launches."""
    normed, total = fused.add_rms_norm(x, residual, norm, EPS)
    result = F.linear(normed, weight)
    return fused.silu_mul(result) if gated else result, total


SIZES: tuple[case.Size, ...] = (
    Size("8B down", 1, 4096, 14336, target=0.90),
    Size("8B gate_up", 1, 28672, 4096, norm=True, target=0.90),
    Size("8B qkv", 1, 6144, 4096, norm=True),
    Size("8B o", 1, 4096, 4096),
    Size("8B lm_head", 1, 128256, 4096, norm=True),
    Size("0.6B qkv", 1, 4096, 1024, norm=True),
    Size("0.6B o", 1, 1024, 2048),
    Size("8B down", 1, 4096, 14336, batch_invariant=True),
    Size("8B down", 2, 4096, 14336),
    Size("8B down", 8, 4096, 14336),
    Size("8B gate_up", 8, 28672, 4096, norm=True),
    Size("8B down", 16, 4096, 14336),
    Size("8B qkv", 16, 6144, 4096, norm=True),
    Size("0.6B o", 8, 1024, 2048),
    Size("8B gate_up", 64, 28672, 4096, norm=True),
    *(Layer("0.6B", rows, (1024, 4096, 2048, 3072)) for rows in (1, 8, 16, 32, 64, 128)),
    *(Layer("8B", rows, (4096, 6144, 4096, 14336)) for rows in (1, 8, 16, 64, 128)),
)
TINY: tuple[case.Size, ...] = (
    Size("toy", 1, 24, 40),
    Size("toy", 1, 24, 40, norm=True, target=0.90),
    Size("toy", 1, 24, 40, batch_invariant=True),
    Size("toy", 4, 24, 40, norm=True),
    Layer("toy", 3, (32, 64, 48, 40)),
)
