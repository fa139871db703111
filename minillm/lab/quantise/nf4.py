"""NF4 (QLoRA, Dettmers et al., 2023, arXiv 2305.14314, section 3 and appendix E): 16 levels at the
quantiles of a normal distribution.

Trained weights are nearly normal, so levels at equal quantiles are used equally often. A block of
64 weights is divided by its largest magnitude m, and each weight becomes the nearest level:

    w' = m * level[code]

Double quantisation stores the scales in 8 bits: m = s * map[code] + mean(m), a float s for 256.
"""

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor

from minillm.lab.quantise.recipe import NF4_BLOCK as BLOCK
from minillm.quantization.quantized import Quantized, integer_codes

OFFSET = (1 - 1 / 30 + 1 - 1 / 32) / 2  # the outermost quantile; 1 would be infinite
NESTED_BLOCK = 256


@dataclass(frozen=True)
class NestedScales:
    """Scales m [n] in 8 bits: m = scales[i // 256] * table[codes[i]] + offset."""

    codes: Tensor  # uint8 [n]
    scales: Tensor  # float32 [ceil(n / 256)]
    table: Tensor  # float32 [256]
    offset: Tensor  # float32 []

    def values(self) -> Tensor:
        """The scales [n]."""
        values = self.table[self.codes.long()]
        return values * self.scales.repeat_interleave(NESTED_BLOCK)[: len(values)] + self.offset


def nf4_levels() -> Tensor:
    """The 16 levels, float32, ascending from -1 to 1: 7 negative, 0 and 8 positive quantiles."""

    def quantiles(count: int) -> list[float]:
        step = (OFFSET - 0.5) / count
        return [NormalDist().inv_cdf(OFFSET - i * step) for i in range(count)]

    levels = [*(-q for q in quantiles(7)), 0.0, *quantiles(8)]
    return (torch.tensor(sorted(levels), dtype=torch.float64) / max(levels)).float()


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """The index of the nearest entry of an ascending table; the lower one of two equally near."""
    return torch.bucketize(values, (table[1:] + table[:-1]) / 2)


def nf4(weight: Tensor, double: bool = True) -> tuple[Quantized, NestedScales | None]:
    """Quantise [out, in]; `in` is a multiple of 64."""
    table = nf4_levels().to(weight.device)
    blocks = weight.float().unflatten(1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)  # [out, in / 64]
    codes = nearest(blocks / largest.clamp(min=1e-30)[..., None], table).flatten(1)
    nested = nested_scales(largest.flatten()) if double else None
    scales = largest if nested is None else nested.values().view_as(largest)
    return Quantized(integer_codes(codes, 4), scales, table=table), nested


def nested_scales(scales: Tensor) -> NestedScales:
    """Double quantisation of scales [n]. They are all positive; without their mean they use the
    signed map evenly."""
    offset, table = scales.mean(), dynamic_map().to(scales.device)
    count = len(scales)
    padded = torch.nn.functional.pad(scales - offset, (0, -count % NESTED_BLOCK))
    blocks = padded.view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(-1)
    codes = nearest(blocks / largest.clamp(min=1e-30)[:, None], table).flatten()[:count]
    return NestedScales(codes.to(torch.uint8), largest, table, offset)


def dynamic_map() -> Tensor:
    """The 8-bit floating-point numbers with a variable exponent (Dettmers, 2015, arXiv 1511.04561,
    section 2): 2^k equally spaced magnitudes of scale 10^(k - 6), k = 0 to 6, and 0 and 1."""
    magnitudes = []
    for k in range(7):
        edges = torch.linspace(0.1, 1, 2**k + 1, dtype=torch.float32)
        magnitudes.append((edges[1:] + edges[:-1]) / 2 * 10.0 ** (k - 6))
    values = torch.cat(magnitudes)
    return torch.cat((-values, values, torch.tensor([0.0, 1.0]))).sort().values
