"""Benchmarks of quantised products: a layer of an 8B model, by format and number of rows.

The peer is `torch.mm` with the weight in bfloat16, which reads 2 to 4 times the bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from minillm_kernels import quantized, quantized_reference
from minillm_kernels.bench import case
from minillm_kernels.bench.case import Bound

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BOUND_BY_OPERATIONS = 512  # rows from which matrix units are the limit
Inputs = tuple[dict[str, Any], Tensor, Tensor]
"""The weight's tensors, x, and the dense weight."""


@dataclass(frozen=True)
class Size(case.Size):
    """A layer, its format and block of scales, and the rows of a step."""

    format: Literal["int4", "int8", "e4m3"]
    num_rows: int
    num_out: int
    size: int
    block: tuple[int, int]

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
    def num_flops(self) -> int:
        """Of the product."""
        return 2 * self.num_rows * self.num_out * self.size

    @property
    def bound(self) -> Bound:
        """By the number of rows."""
        return "matmul" if self.num_rows >= BOUND_BY_OPERATIONS else "copy"

    @property
    def name(self) -> str:
        """What is computed."""
        block = "x".join(map(str, self.block))
        return f"{self.format} {block} M={self.num_rows} {self.size}->{self.num_out}"

    def make(self, device: str, number: int) -> Inputs:
        """Random codes and scales that keep results near 1."""
        rows, columns = self.block
        place: Any = {"device": device}
        shape, near_one = (self.num_out, self.size), self.size**-0.5
        x = torch.randn(self.num_rows, self.size, dtype=BF16, **place)
        groups = -(-self.size // columns), -(-self.num_out // rows)
        scales = (1 + torch.rand(groups, **place)) * near_one / 8
        if self.format == "int4":
            codes = torch.randint(0, 16, shape, **place)
            zeros = torch.full(groups, 8, dtype=torch.int8, **place)
            scales = scales.half()
            packed = quantized_reference.interleave(codes)
            weight: dict[str, Any] = {"codes": packed, "scales": scales, "zeros": zeros}
            numbers = codes.float() - 8
        else:
            codes = torch.randn(shape, **place).mul_(8)
            codes = codes.round().to(torch.int8) if self.format == "int8" else codes.to(E4M3)
            weight, numbers = {"codes": codes, "scales": scales}, codes.float()
        dense = numbers * quantized_reference.by_column(scales.float(), rows, columns, shape)
        return weight, x, dense.to(BF16)

    def run(self, inputs: Inputs) -> object:
        """The kernel."""
        weight, x, _ = inputs
        if self.format == "int4":
            return quantized.int4_linear(x, **weight)
        return quantized.scaled_linear(x, **weight, block=self.block)

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """cuBLAS with the dense weight."""
        return {"torch": lambda inputs: torch.mm(inputs[1], inputs[2].T)}


DOWN = 4096, 14336
SIZES = (
    Size("int4", 1, *DOWN, (1, 128), target=0.50, peer_targets={"torch": 3.0}),
    Size("int4", 16, *DOWN, (1, 128), peer_targets={"torch": 2.8}),
    Size("int4", 64, *DOWN, (1, 128), peer_targets={"torch": 1.5}),
    Size("int4", 2048, *DOWN, (1, 128)),
    Size("int4", 1, *DOWN, (1, 32)),
    Size("int8", 1, *DOWN, (1, 14336), target=0.65),
    Size("int8", 2048, *DOWN, (1, 14336)),
    Size("e4m3", 1, *DOWN, (1, 14336), target=0.78),
    Size("e4m3", 16, *DOWN, (128, 128)),
)
TINY = (
    Size("int4", 1, 24, 64, (1, 32), target=0.50, peer_targets={"torch": 3.0}),
    Size("int8", 3, 24, 40, (1, 40)),
    Size("e4m3", 2, 24, 64, (16, 32)),
)
