"""Cases of the products with quantised weights, and launches of real models' layers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from minillm_kernels import quantized, quantized_reference
from minillm_kernels.check.case import (
    Launch,
    Mismatch,
    blank,
    compare_products,
    generator,
    guarded,
    in_rows,
    normal,
    surrounded,
)

FP32, FP16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
DTYPES = (FP32, FP16, BF16)
Kind = Literal["int4", "int8", "e4m3"]


@dataclass(frozen=True)
class Case:
    """One call: x [rows, size], weight [num_out, size].

    Attributes:
        kind: the format of the weight.
        block: rows and columns that share a scale; for 4 bits the columns of a group.
        offset: of 4-bit groups.
        view: x and codes are parts of wider rows.
        tile: another `Config`, as block_out, block_rows, block_in and splits.
    """

    kind: Kind
    rows: int
    num_out: int
    size: int
    dtype: torch.dtype = BF16
    block: tuple[int, int] = (1, 32)
    offset: Literal["zeros", "minima"] | None = None
    bias: bool = False
    view: bool = False
    batch_invariant: bool = False
    tile: tuple[int, int, int, int] | None = None
    seed: int = 0


Arguments = dict[str, Any]


def verify(case: Case, device: str = "cpu", kernels: ModuleType = quantized) -> None:
    """Run the case with the launchers of `kernels`; Mismatch if they are wrong."""
    name, arguments = inputs(case, device)
    out = guarded((case.rows, case.num_out), case.dtype, device)
    getattr(kernels, name)(**arguments, **options_of(case, kernels), out=out.view)
    out.check()
    known = {
        key: value.cpu() if isinstance(value, Tensor) else value for key, value in arguments.items()
    }
    run, x = getattr(quantized_reference, name), known.pop("x").double()
    expected = run(x, **known)
    weight = run(torch.eye(case.size).double(), **known | {"bias": None}).T
    compare_products(out.view, expected, x, weight, floor=1e-6)


def verify_invariant(case: Case, device: str = "cpu", kernels: ModuleType = quantized) -> None:
    """A row alone has the bits that it has among others; Mismatch if not."""
    if not case.rows:
        return
    name, arguments = inputs(case, device)
    options = options_of(replace(case, batch_invariant=True), kernels)
    run, x = getattr(kernels, name), arguments.pop("x")
    together = run(x, **arguments, **options)
    for row in {0, case.rows - 1}:
        if not torch.equal(run(x[row : row + 1], **arguments, **options)[0], together[row]):
            raise Mismatch(f"row {row} alone has other bits")


def options_of(case: Case, kernels: ModuleType) -> Arguments:
    """Keyword arguments that choose a tile."""
    options: Arguments = {"batch_invariant": case.batch_invariant}
    if case.tile is not None:
        block_out, block_rows, block_in, splits = case.tile
        options["config"] = kernels.Config(block_out, block_rows, block_in, splits=splits)
    return options


def inputs(case: Case, device: str) -> tuple[str, Arguments]:
    """The launcher's name, and its tensors."""
    rng = generator(1000 * case.seed + 7)
    x = normal(rng, (case.rows, case.size), case.dtype, device)
    arguments: Arguments = {"x": in_rows(x, 16 if case.view else 0, powers=True), "bias": None}
    if case.bias:
        arguments["bias"] = surrounded(normal(rng, (case.num_out,), case.dtype, device))
    if case.kind == "int4":
        return "int4_linear", arguments | four_bits(case, rng, device)
    rows, columns = case.block
    shape = -(-case.size // columns), -(-case.num_out // rows)
    arguments["codes"] = eight_bits(case, rng, device)
    arguments["scales"] = surrounded(normal(rng, shape, FP32, device, 0.05))
    return "scaled_linear", arguments | {"block": case.block}


def wide(codes: Tensor, view: bool) -> Tensor:
    """The same codes, with poison after each row if `view`."""
    return in_rows(codes.view(torch.uint8), 32 * view).view(codes.dtype)


def four_bits(case: Case, rng: torch.Generator, device: str) -> Arguments:
    """Codes, scales (some negative, as AutoRound's) and offsets of 4-bit groups."""
    codes = torch.randint(0, 16, (case.num_out, case.size), generator=rng)
    scale_type = FP16 if case.seed % 2 else (BF16 if case.dtype == BF16 else FP32)
    groups = (case.size // case.block[1], case.num_out)
    arguments: Arguments = {
        "codes": wide(quantized_reference.interleave(codes).to(device), case.view),
        "scales": surrounded(normal(rng, groups, scale_type, device, 0.05)),
    }
    if case.offset == "zeros":
        zeros = torch.randint(-4, 21, groups, generator=rng).to(torch.int8).to(device)
        arguments["zeros"] = surrounded(zeros)
    if case.offset == "minima":
        arguments["minima"] = surrounded(normal(rng, groups, scale_type, device, 0.5))
    return arguments


def eight_bits(case: Case, rng: torch.Generator, device: str) -> Tensor:
    """Codes [out, in] of all sizes."""
    shape = case.num_out, case.size
    if case.kind == "int8":
        codes = torch.randint(-127, 128, shape, generator=rng).to(torch.int8)
    else:
        bits = torch.randint(0, 127, shape, generator=rng).to(torch.uint8)  # without NaN
        bits |= (torch.randint(0, 2, shape, generator=rng) << 7).to(torch.uint8)
        codes = bits.view(E4M3)
    return wide(codes.to(device), case.view)


INT4 = (
    *(Case("int4", 3, 48, 128, dtype, offset="zeros", bias=True) for dtype in DTYPES),
    *(Case("int4", 3, 48, 128, dtype, (1, 64), "minima", seed=1) for dtype in DTYPES),
    *(Case("int4", rows, 70, 384, block=(1, 128), offset="zeros") for rows in (1, 16, 17, 70)),
    Case("int4", 1, 33, 96, FP32, (1, 96), bias=True, view=True),
    Case("int4", 5, 130, 192, FP16, (1, 64), "zeros", view=True, batch_invariant=True),
    Case("int4", 2, 20, 256, FP32, (1, 128), "zeros", True, tile=(16, 16, 64, 3)),
    Case("int4", 18, 40, 256, FP32, (1, 64), "minima", True, tile=(32, 16, 32, 4), view=True),
    Case("int4", 0, 8, 32),
    Case("int4", 3, 0, 32),
)
SCALED = (
    *(Case("e4m3", 3, 48, 200, dtype, (1, 200), bias=True) for dtype in DTYPES),
    *(Case("e4m3", rows, 200, 300, block=(128, 128)) for rows in (1, 70)),
    *(Case("int8", 3, 40, 160, dtype, (1, 32), view=True) for dtype in DTYPES),
    Case("int8", 2, 7, 1, FP32, (1, 1)),
    Case("e4m3", 2, 100, 500, FP32, (32, 64), bias=True, tile=(16, 16, 32, 3), view=True),
    Case("int8", 3, 30, 700, FP32, (1, 700), bias=True, tile=(16, 16, 32, 5), view=True),
    Case("e4m3", 4, 66, 1100, FP16, (1, 1100), batch_invariant=True),
    Case("e4m3", 0, 8, 32),
    Case("e4m3", 3, 0, 32),
)  # fmt: skip
CASES: tuple[Case, ...] = (*INT4, *SCALED)


def random_case(rng: random.Random) -> Case:
    """Any case."""
    kind: Kind = rng.choice(("int4", "int4", "int8", "e4m3"))
    columns = rng.choice((32, 64, 128))
    size, rows_of_block = rng.randint(1, 500), rng.choice((1, 1, 32, 128))
    if kind == "int4":
        size, rows_of_block = columns * rng.randint(1, 6), 1
    elif rng.random() < 0.4:
        columns, rows_of_block = size, 1  # per channel
    tile = None
    if rng.random() < 0.4:
        inside = 32 if columns % 64 else rng.choice((32, 64))
        tile = (rng.choice((16, 64)), rng.choice((16, 32)), inside, rng.randint(1, 5))
    return Case(
        kind,
        rng.choice((0, 1, 1, 2, rng.randint(1, 70))),
        rng.choice((1, 8, rng.randint(1, 200))),
        size,
        rng.choice(DTYPES),
        (rows_of_block, columns),
        rng.choice(("zeros", "minima", None)),
        rng.random() < 0.5,
        rng.random() < 0.5,
        rng.random() < 0.3,
        tile,
        rng.randrange(2**20),
    )


# ---- real models, to be compiled -------------------------------------------------------------

ARCHITECTURES = (80, 90, 100)


def _int4(
    rows: int, num_out: int, size: int, group: int, dtype: torch.dtype, offset: str
) -> Callable[[], object]:
    scales = blank(size // group, num_out, dtype=FP16)
    dtype_of_offsets = torch.int8 if offset == "zeros" else FP16
    offsets: Arguments = {offset: blank(*scales.shape, dtype=dtype_of_offsets)}
    x, codes = blank(rows, size, dtype=dtype), blank(num_out, size // 2, dtype=torch.uint8)
    return partial(quantized.int4_linear, x, codes, scales, **offsets)


def _scaled(
    rows: int, num_out: int, size: int, block: tuple[int, int], codes: torch.dtype = E4M3
) -> Callable[[], object]:
    scales = blank(-(-size // block[1]), -(-num_out // block[0]), dtype=FP32)
    weight = blank(num_out, size, dtype=codes)
    return partial(quantized.scaled_linear, blank(rows, size), weight, scales, block=block)


def _launch(name: str, run: Callable[[], object], units: bool = True) -> Launch:
    return Launch(name, run, tensor_cores=ARCHITECTURES if units else ())


LAUNCHES: tuple[Launch, ...] = (
    _launch("int4 g128 Llama-3.1-8B down 1", _int4(1, 4096, 14336, 128, BF16, "zeros")),
    _launch("int4 g128 Llama-3.1-8B down 64", _int4(64, 4096, 14336, 128, FP16, "zeros")),
    _launch("int4 g128 Llama-3.1-8B gate_up 2048", _int4(2048, 28672, 4096, 128, BF16, "zeros")),
    _launch("int4 g32 Qwen3-0.6B qkv 8", _int4(8, 4096, 1024, 32, BF16, "minima")),
    _launch("int4 equality tests", _int4(8, 1024, 1024, 64, FP32, "zeros"), units=False),
    _launch("e4m3 channels Llama-3.1-8B down 1", _scaled(1, 4096, 14336, (1, 14336))),
    _launch("e4m3 blocks DeepSeek-V3 q_b 8", _scaled(8, 24576, 1536, (128, 128))),
    _launch("e4m3 blocks DeepSeek-V3 q_b 2048", _scaled(2048, 24576, 1536, (128, 128))),
    _launch("Q8_0 Qwen3-0.6B o 4", _scaled(4, 1024, 2048, (1, 32), torch.int8)),
)
