"""Benchmarks of products of few rows: the layers of a model in decode, and other tiles for them.

Peers named by a tile are the same kernel with another `Config`: what a table of them would say.
The products of a whole layer are measured with norms and SwiGLU in them, and between cuBLAS.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels import fused, gemv
from minillm_kernels.bench.case import Call, Measurement, sets_beyond_cache
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
    return found + [Layer(*each, device).measurement() for each in layers]


def measurement(size: Size, device: str) -> Measurement:
    """Weights are made at the first call, so that a list of measurements costs no memory."""
    sets = Sets(size, device)
    return Measurement(
        family="gemv",
        name=size.name,
        run=sets.ours(None),
        num_bytes=size.num_bytes,
        num_flops=2 * size.num_rows * size.num_out * size.size,
        peers=sets.peers(),
        num_sets=sets.count,
        target=size.target,
    )


@dataclass
class Sets:
    """The tensors of a measurement: as many weights as a cache cannot hold."""

    size: Size
    device: str
    made: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Input sets, together larger than the cache."""
        return 2 if self.device == "cpu" else sets_beyond_cache(self.size.num_bytes)

    def inputs(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, the norm's weight and the weight of one set."""
        if not self.made:
            self.made = [self.make() for _ in range(self.count)]
        return self.made[number % self.count]

    def make(self) -> tuple[Tensor, Tensor, Tensor]:
        """Normal numbers of a size that keeps results near 1."""
        size, options = self.size, {"dtype": torch.bfloat16, "device": self.device}
        x = torch.randn(size.num_rows, size.size, **options)  # type: ignore[call-overload]
        weight = torch.randn(size.num_out, size.size, **options)  # type: ignore[call-overload]
        norm_weight = torch.ones(size.size, **options)  # type: ignore[call-overload]
        return x, norm_weight, weight.mul_(size.size**-0.5)

    def ours(self, config: Config | None) -> Call:
        """The kernel, with its own tile or another."""

        def call(number: int) -> object:
            x, norm_weight, weight = self.inputs(number)
            invariant = self.size.batch_invariant
            if not self.size.norm:
                return gemv.linear(x, weight, config=config, batch_invariant=invariant)
            options = {"config": config, "batch_invariant": invariant}
            return gemv.norm_linear(x, None, norm_weight, EPS, weight, **options)  # type: ignore[arg-type]

        return call

    def torch_linear(self, number: int) -> object:
        """cuBLAS, after torch's own norm."""
        x, norm_weight, weight = self.inputs(number)
        if self.size.norm:
            x = F.rms_norm(x, (self.size.size,), norm_weight, EPS)
        return F.linear(x, weight)

    def peers(self) -> Mapping[str, Call]:
        """torch, and other tiles."""
        tiles = {described(tile): self.ours(tile) for tile in self.size.tiles}
        return {"torch": self.torch_linear} | tiles


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


@dataclass
class Layer:
    """The four products of a layer, with norms, residual additions and SwiGLU, without attention:
    a part of qkv stands for its output."""

    model: str
    num_rows: int
    widths: tuple[int, int, int, int]
    device: str
    made: list[tuple[Tensor, ...]] = field(default_factory=list)

    def measurement(self) -> Measurement:
        """All in the products; peers: the products of the engine with more than 8 rows, everything
        apart, and dependent launches."""
        width, qkv, heads, units = self.widths
        count = width * (qkv + heads + 3 * units)
        peers = {
            "o and down by cuBLAS": partial(self.run, F.linear, norm_linear),
            "cuBLAS, the rest apart": partial(self.run, F.linear, apart),
            "dependent launches": partial(
                self.run, partial(gemv.linear, dependent=True), partial(norm_linear, dependent=True)
            ),
        }
        return Measurement(
            family="gemv",
            name=f"layer {self.model} M={self.num_rows}",
            run=partial(self.run, gemv.linear, norm_linear),
            num_bytes=2 * count,
            num_flops=2 * self.num_rows * count,
            peers=peers,
            num_sets=2 if self.device == "cpu" else sets_beyond_cache(2 * count),
        )

    def run(self, product: Any, normed: Any, number: int) -> object:
        """One layer: `product` of o and down, `normed` of qkv and gate_up."""
        if not self.made:
            sets = 2 if self.device == "cpu" else self.measurement().num_sets
            self.made = [self.make() for _ in range(sets)]
        x, residual, norm, qkv, o, gate_up, down = self.made[number % len(self.made)]
        heads, residual = normed(x, residual, norm, qkv)
        x = product(heads[:, : o.shape[1]], o)
        gated, residual = normed(x, residual, norm, gate_up, gated=True)
        return product(gated, down), residual

    def make(self) -> tuple[Tensor, ...]:
        """Rows, the norm's weight, and weights that keep results near 1."""
        width, qkv, heads, units = self.widths
        shapes = (self.num_rows, width), (self.num_rows, width), (1, width)
        weights = (qkv, width), (width, heads), (2 * units, width), (width, units)
        x, residual, norm, *others = (
            torch.randn(shape, dtype=torch.bfloat16, device=self.device)
            for shape in (*shapes, *weights)
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
