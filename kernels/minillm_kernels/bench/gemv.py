"""Benchmarks of products of few rows: the layers of a model in decode, and other tiles for them.

Peers named by a tile are the same kernel with another `Config`: what a table of them would say.
The products of a whole layer are measured with norms and SwiGLU in them, and between cuBLAS.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels import fused, gemv
from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache
from minillm_kernels.gemv_config import Config

EPS = 1e-6
# Tiles to compare: rows and columns of W, warps, stages (1: loads into registers) and splits.
ONE_ROW = (
    Config(8, 1024, num_stages=1),
    Config(8, 1024, num_stages=4),
    Config(4, 1024, num_stages=4),
    Config(16, 512, num_stages=4),
)
SEVERAL_ROWS = (
    Config(64, 64, num_stages=6),
    Config(64, 128, num_stages=4, splits=4),
    Config(32, 128, num_stages=5),
    Config(128, 64, num_warps=4, num_stages=6),
)
TALL = (
    Config(64, 64, num_stages=4, block_rows=64),
    Config(128, 64, num_warps=8, num_stages=4, block_rows=64),
    Config(64, 128, num_stages=3, block_rows=32),
)


@dataclass(frozen=True)
class Size:
    """A layer, the rows of a step, and the share of the copy rate that is wanted."""

    model: str
    num_rows: int
    num_out: int
    size: int
    norm: bool = False
    batch_invariant: bool = False
    tiles: tuple[Config, ...] = ()
    target: float | None = None

    @property
    def num_bytes(self) -> int:
        """Of the weight, x and y in bfloat16, each once."""
        return 2 * (self.num_out * self.size + self.num_rows * (self.size + self.num_out))

    @property
    def name(self) -> str:
        """What is computed."""
        what = "norm_linear" if self.norm else "linear"
        shape = f"M={self.num_rows} {self.size}->{self.num_out}"
        return f"{what} {self.model} {shape}" + " batch-invariant" * self.batch_invariant


SIZES = (
    Size("8B down", 1, 4096, 14336, tiles=ONE_ROW, target=0.90),
    Size("8B gate_up", 1, 28672, 4096, norm=True, tiles=ONE_ROW, target=0.90),
    Size("8B qkv", 1, 6144, 4096, norm=True),
    Size("8B o", 1, 4096, 4096),
    Size("8B lm_head", 1, 128256, 4096, norm=True),
    Size("0.6B qkv", 1, 4096, 1024, norm=True),
    Size("0.6B o", 1, 1024, 2048, tiles=(Config(1, 1024, num_stages=3),)),
    Size("8B down", 1, 4096, 14336, batch_invariant=True),
    Size("8B down", 2, 4096, 14336),
    Size("8B down", 8, 4096, 14336, tiles=SEVERAL_ROWS),
    Size("8B gate_up", 8, 28672, 4096, norm=True, tiles=SEVERAL_ROWS),
    Size("8B down", 16, 4096, 14336),
    Size("8B qkv", 16, 6144, 4096, norm=True),
    Size("0.6B o", 8, 1024, 2048),
    Size("8B gate_up", 64, 28672, 4096, norm=True, tiles=TALL),
)
TINY = (
    Size("toy", 1, 24, 40, tiles=(Config(8, 32),)),
    Size("toy", 1, 24, 40, norm=True, target=0.90),
    Size("toy", 1, 24, 40, batch_invariant=True),
    Size("toy", 4, 24, 40, norm=True, tiles=(Config(16, 16, splits=2),)),
)


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    device, sizes, layers = ("cpu", TINY, TINY_LAYERS) if tiny else ("cuda", SIZES, LAYERS)
    found = [measurement(size, device) for size in sizes]
    return found + [layer(*each, device) for each in layers]


def measurement(size: Size, device: str) -> Measurement:
    """Peers: cuBLAS behind torch's own norm, and other tiles."""
    count = 2 if device == "cpu" else sets_beyond_cache(size.num_bytes)
    sets = Sets(lambda number: make(size, device), count)
    peers = {"torch": sets.call(torch_linear, size)}
    peers |= {described(tile): sets.call(ours, size, tile) for tile in size.tiles}
    return Measurement(
        family="gemv",
        name=size.name,
        run=sets.call(ours, size, None),
        num_bytes=size.num_bytes,
        num_flops=2 * size.num_rows * size.num_out * size.size,
        peers=peers,
        num_sets=sets.count,
        target=size.target,
    )


def make(size: Size, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """x, the norm's weight and the weight: numbers of a size that keeps results near 1."""
    x, weight = (
        torch.randn(rows, size.size, dtype=torch.bfloat16, device=device)
        for rows in (size.num_rows, size.num_out)
    )
    return x, torch.ones_like(x[0]), weight.mul_(size.size**-0.5)


def ours(inputs: tuple[Tensor, Tensor, Tensor], size: Size, config: Config | None) -> object:
    """The kernel, with its own tile or another."""
    x, norm_weight, weight = inputs
    options: Any = {"config": config, "batch_invariant": size.batch_invariant}
    if not size.norm:
        return gemv.linear(x, weight, **options)
    return gemv.norm_linear(x, None, norm_weight, EPS, weight, **options)


def torch_linear(inputs: tuple[Tensor, Tensor, Tensor], size: Size) -> object:
    """cuBLAS, after torch's own norm."""
    x, norm_weight, weight = inputs
    return F.linear(F.rms_norm(x, (size.size,), norm_weight, EPS) if size.norm else x, weight)


def described(tile: Config) -> str:
    """A tile in a few characters."""
    text = f"{tile.block_out}x{tile.block_in} w{tile.num_warps} s{tile.num_stages}"
    return text + (f" /{tile.splits}" if tile.splits > 1 else "")


# ---- layers ----------------------------------------------------------------------------------

# Model, rows, and widths: of the residual stream, qkv, the output of attention, the MLP.
SMALL, LARGE = (1024, 4096, 2048, 3072), (4096, 6144, 4096, 14336)
LAYERS = (
    *(("0.6B", rows, SMALL) for rows in (1, 8, 16, 32, 64, 128)),
    *(("8B", rows, LARGE) for rows in (1, 8, 16, 64, 128)),
)
TINY_LAYERS = (("toy", 3, (32, 64, 48, 40)),)


def layer(model: str, rows: int, widths: tuple[int, int, int, int], device: str) -> Measurement:
    """The four products of a layer, with norms, residual additions and SwiGLU, without attention: a
    part of qkv stands for its output. Peers: the products of the engine with more than 8 rows,
    everything apart, and dependent launches."""
    width, qkv, heads, units = widths
    count = width * (qkv + heads + 3 * units)
    num_sets = 2 if device == "cpu" else sets_beyond_cache(2 * count)
    sets = Sets(lambda number: weights_of(rows, widths, device), num_sets)
    dependent = partial(gemv.linear, dependent=True), partial(norm_linear, dependent=True)
    return Measurement(
        family="gemv",
        name=f"layer {model} M={rows}",
        run=sets.call(run_layer, gemv.linear, norm_linear),
        num_bytes=2 * count,
        num_flops=2 * rows * count,
        peers={
            "o and down by cuBLAS": sets.call(run_layer, F.linear, norm_linear),
            "cuBLAS, the rest apart": sets.call(run_layer, F.linear, apart),
            "dependent launches": sets.call(run_layer, *dependent),
        },
        num_sets=num_sets,
    )


def run_layer(inputs: tuple[Tensor, ...], product: Any, normed: Any) -> object:
    """One layer: `product` of o and down, `normed` of qkv and gate_up."""
    x, residual, norm, qkv, o, gate_up, down = inputs
    heads, residual = normed(x, residual, norm, qkv)
    x = product(heads[:, : o.shape[1]], o)
    gated, residual = normed(x, residual, norm, gate_up, gated=True)
    return product(gated, down), residual


def weights_of(rows: int, widths: tuple[int, int, int, int], device: str) -> tuple[Tensor, ...]:
    """Rows, the norm's weight, and weights that keep results near 1."""
    width, qkv, heads, units = widths
    shapes = (rows, width), (rows, width), (1, width)
    weights = (qkv, width), (width, heads), (2 * units, width), (width, units)
    x, residual, norm, *others = (
        torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in (*shapes, *weights)
    )
    return x, residual, norm[0], *(each.mul_(each.shape[1] ** -0.5) for each in others)


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
