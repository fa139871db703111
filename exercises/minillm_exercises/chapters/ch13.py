"""Chapter 13: formats of weights, the bytes that a step reads, and the time of one product."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from minillm.config import ModelConfig
from minillm.lab.quantise.grid import Grid, round_to_grid
from minillm.layers.linear import Linear
from minillm.models.packing import into_panels
from minillm.ops import cpu
from minillm.plan.parameters import all_products
from minillm.quantization.methods import install
from minillm.quantization.panels import pack_quantized
from minillm.quantization.rounding import round_symmetric
from minillm_exercises import measure
from minillm_exercises.chapters.common import rounds
from minillm_exercises.chapters.common import show_table as show_table

ROTATED = rounds(96 * 2**20)  # bytes of each format read in turn, so that no cache holds them
SIDE = 4096  # inputs and outputs of the matrix that is timed


class Format(NamedTuple):
    """A format: its name, its bits for a weight with all scales, and how it rounds a matrix."""

    name: str
    bits: float
    rounded: Callable[[Tensor], Tensor]


def fp8(weight: Tensor) -> Tensor:
    """Every weight as an 8-bit floating-point number (e4m3), with a scale for each row."""
    scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def q4_0(weight: Tensor) -> Tensor:
    """GGUF's Q4_0: blocks of 32; the weight that is largest in size becomes the code 0 (-8 steps).

    The step d is negative where this weight is positive.
    """
    groups = weight.unflatten(1, (-1, 32))
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    d = extreme / -8
    codes = (groups * torch.where(d == 0, 0.0, 1 / d) + 8.5).floor().clamp(0, 15)
    return ((codes - 8) * d.half().float()).flatten(1)


def q4_k(weight: Tensor) -> Tensor:
    """GGUF's Q4_K with grids from the smallest to the largest weight (ggml searches better ones).

    Blocks of 32 have a step and a minimum of 6 bits each; both are multiples of two 16-bit numbers
    that 8 blocks share.
    """
    groups = weight.unflatten(1, (-1, 8, 32))
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    step = (groups.amax(-1, keepdim=True).clamp(min=0) - low) / 15
    d, d_low = (
        (each.amax(-2, keepdim=True) / 63).half().float().clamp(min=1e-7) for each in (step, -low)
    )
    step, low = (step / d).round() * d, (low / d_low).round() * d_low
    codes = ((groups - low) / step.clamp(min=1e-9)).round().clamp(0, 15)
    return (codes * step + low).flatten(1, 3)


# The bytes of a step ------------------------------------------------------------------------------


def step_bytes(config: ModelConfig, bits: float, head_bits: float) -> float:
    """Bytes that a step for one token reads: the matrices of all layers, and the output matrix."""
    layers = sum(n * product.parameters_read(1) for product, n in all_products(config).items())
    return (layers * bits + config.hidden_size * config.vocab_size * head_bits) / 8


def file_bytes(config: ModelConfig, bits: float, rest_bits: float = 16) -> float:
    """Bytes of a file with the matrices of the layers in `bits` and both tables in `rest_bits`."""
    tables = config.hidden_size * config.vocab_size * (1 if config.tie_word_embeddings else 2)
    layers = sum(n * product.parameters for product, n in all_products(config).items())
    return (layers * bits + tables * rest_bits) / 8


# The time of a product ----------------------------------------------------------------------------


def layers(weight: Tensor, how: str, count: int = 1) -> list[Linear]:
    """Linear layers of the engine with this weight: "bf16", "int8" or "int4", packed for a CPU
    where there are C functions for it."""
    found = [Linear("", weight.shape[1], {"w": weight.shape[0]}) for _ in range(count)]
    for each in found:
        each.create(torch.bfloat16, "cpu")
        with torch.no_grad():
            each.weight.copy_(weight)
    if how == "bf16":
        if cpu.takes_panels(found[0].weight):
            into_panels(found)
        return found
    quantized = round_symmetric(weight) if how == "int8" else round_to_grid(weight, Grid(4), 128)
    for each in found:
        install(each, quantized, torch.bfloat16)
    pack_quantized(found)
    return found


def has_products() -> bool:
    """Whether the engine has products with quantised weights in C on this machine."""
    return cpu.panels_are_fast(torch.bfloat16)


class Product:
    """A product with several copies of one matrix in turn, so that each is read from memory."""

    def __init__(self, weight: Tensor, how: str):
        size = weight.numel() * {"bf16": 2, "int8": 1, "int4": 0.5}[how]
        copies = max(2, math.ceil(ROTATED / size)) if has_products() else 2
        self.layers = layers(weight, how, copies)
        self.num_bytes = self.layers[0].num_bytes

    def seconds(self, rows: int) -> float:
        """The shortest time of a product with so many rows."""
        x = torch.randn(rows, self.layers[0].in_features).bfloat16()

        def all_copies() -> None:
            for each in self.layers:
                each(x)

        with torch.inference_mode():
            times = measure(all_copies, repeats=15, budget=0.6).times
        return min(times) / len(self.layers)


def products(hows: Sequence[str]) -> dict[str, Product]:
    """The products of one random matrix in several formats."""
    generator = torch.Generator().manual_seed(13)
    weight = 0.02 * torch.randn(SIDE, SIDE, generator=generator)
    return {how: Product(weight, how) for how in hows}


def bounds(
    made: Mapping[str, Product], bandwidth: float, took: Mapping[str, float] = MappingProxyType({})
) -> dict[str, float]:
    """Seconds in which the bytes of each format can be read, at the highest rate that is known:
    `bandwidth`, or that of a product which `took` so many seconds."""
    bandwidth = max([bandwidth, *(made[how].num_bytes / time for how, time in took.items())])
    return {how: each.num_bytes / bandwidth for how, each in made.items()}
