"""Benchmarks of quantised products: a layer of an 8B model, by format and number of rows.

The peer is `torch.mm` with the weight in bfloat16, which reads 2 to 4 times the bytes.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from minillm_kernels import quantized, quantized_reference
from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Format = Literal["int4", "int8", "e4m3"]


@dataclass(frozen=True)
class Size:
    """A layer, its format and block of scales, and the rows of a step."""

    format: Format
    num_rows: int
    num_out: int
    size: int
    block: tuple[int, int]
    target: float | None = None  # share of the copy rate
    over_bf16: float | None = None  # torch.mm's time over ours

    @property
    def num_bytes(self) -> int:
        """Of codes, scales, x and y, each once."""
        rows, columns = self.block
        scales = -(-self.size // columns) * -(-self.num_out // rows)
        offsets = scales if self.format == "int4" else 0  # a zero point each
        codes = self.num_out * self.size // (2 if self.format == "int4" else 1)
        scale_bytes = 2 if self.format == "int4" else 4
        activations = 2 * self.num_rows * (self.size + self.num_out)
        return codes + scale_bytes * scales + offsets + activations

    @property
    def name(self) -> str:
        """What is computed."""
        block = "x".join(map(str, self.block))
        return f"{self.format} {block} M={self.num_rows} {self.size}->{self.num_out}"


DOWN = 4096, 14336
SIZES = (
    Size("int4", 1, *DOWN, (1, 128), target=0.50, over_bf16=3.0),
    Size("int4", 16, *DOWN, (1, 128), over_bf16=2.8),
    Size("int4", 64, *DOWN, (1, 128), over_bf16=1.5),
    Size("int4", 2048, *DOWN, (1, 128)),
    Size("int4", 1, *DOWN, (1, 32)),
    Size("int8", 1, *DOWN, (1, 14336), target=0.65),
    Size("int8", 2048, *DOWN, (1, 14336)),
    Size("e4m3", 1, *DOWN, (1, 14336), target=0.78),
    Size("e4m3", 16, *DOWN, (128, 128)),
)
TINY = (
    Size("int4", 1, 24, 64, (1, 32), target=0.50, over_bf16=3.0),
    Size("int8", 3, 24, 40, (1, 40)),
    Size("e4m3", 2, 24, 64, (16, 32)),
)
BOUND_BY_OPERATIONS = 512  # rows from which matrix units are the limit


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    return [measurement(size, "cpu" if tiny else "cuda") for size in (TINY if tiny else SIZES)]


def measurement(size: Size, device: str) -> Measurement:
    """The peer is cuBLAS with the dense weight."""
    count = 2 if device == "cpu" else sets_beyond_cache(size.num_bytes)
    sets = Sets(lambda number: make(size, device), count)
    return Measurement(
        family="quantized",
        name=size.name,
        run=sets.call(ours, size),
        num_bytes=size.num_bytes,
        num_flops=2 * size.num_rows * size.num_out * size.size,
        bound="matmul" if size.num_rows >= BOUND_BY_OPERATIONS else "copy",
        peers={"torch": sets.call(lambda inputs: torch.mm(inputs[1], inputs[2].T))},
        num_sets=sets.count,
        target=size.target,
        peer_targets={} if size.over_bf16 is None else {"torch": size.over_bf16},
    )


def make(size: Size, device: str) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The weight's tensors, random codes and scales that keep results near 1; x; and the dense
    weight."""
    rows, columns = size.block
    place: Any = {"device": device}
    shape, near_one = (size.num_out, size.size), size.size**-0.5
    x = torch.randn(size.num_rows, size.size, dtype=BF16, **place)
    groups = -(-size.size // columns), -(-size.num_out // rows)
    scales = (1 + torch.rand(groups, **place)) * near_one / 8
    if size.format == "int4":
        codes = torch.randint(0, 16, shape, **place)
        zeros = torch.full(groups, 8, dtype=torch.int8, **place)
        scales = scales.half()
        packed = quantized_reference.interleave(codes)
        weight: dict[str, Any] = {"codes": packed, "scales": scales, "zeros": zeros}
        numbers = codes.float() - 8
    else:
        codes = torch.randn(shape, **place).mul_(8)
        codes = codes.round().to(torch.int8) if size.format == "int8" else codes.to(E4M3)
        weight, numbers = {"codes": codes, "scales": scales}, codes.float()
    dense = numbers * quantized_reference.by_column(scales.float(), rows, columns, shape)
    return weight, x, dense.to(BF16)


def ours(inputs: tuple[dict[str, Any], Tensor, Tensor], size: Size) -> object:
    """The kernel."""
    weight, x, _ = inputs
    if size.format == "int4":
        return quantized.int4_linear(x, **weight)
    return quantized.scaled_linear(x, **weight, block=size.block)
