"""Cases of the products with quantised weights, and launches of real models' layers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor

from minillm_kernels import quantized, quantized_reference
from minillm_kernels.check.case import Launch, Mismatch, compare, generator, guarded, normal

FP32, FP16, BF16, E4M3 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn
DTYPES = (FP32, FP16, BF16)
POISON = 0x7F  # around codes: the largest int8, and NaN in e4m3
Kind = Literal["int4", "int8", "e4m3", "int8 blocks", "e4m3 rows", "round"]


@dataclass(frozen=True)
class Case:
    """One call: x [rows, size], weight [num_out, size].

    Attributes:
        kind: the format of the weight. "e4m3" and "int8 blocks": x in 16 bits; "e4m3 rows": x is
            e4m3, too; "round": `quantize_rows` alone.
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
    if case.kind == "round":
        verify_rounding(case, device, kernels)
        return
    name, arguments, weight = inputs(case, device)
    out = guarded((case.rows, case.num_out), case.dtype, device)
    options = options_of(case, kernels)
    getattr(kernels, name)(**arguments, **options, out=out.view)
    out.check()
    factors, bias = dense_rows(arguments).cpu(), arguments["bias"]
    expected = factors @ weight.T
    if bias is not None:
        expected += bias.double().cpu()
    # Each row by its own scale: how far apart sums of such products are, even if one is near 0.
    spread = (factors**2 @ weight.T**2).sqrt()  # [rows, num_out]
    for row in range(case.rows if case.num_out else 0):
        floor = max(1e-6, float(spread[row].max()))
        compare(out.view[row], expected[row], f"row {row}", floor=floor)


def verify_invariant(case: Case, device: str = "cpu", kernels: ModuleType = quantized) -> None:
    """A row alone has the bits that it has among others; Mismatch if not."""
    if case.kind == "round" or not case.rows:
        return
    name, arguments, _ = inputs(case, device)
    options = options_of(replace(case, batch_invariant=True), kernels)
    run = getattr(kernels, name)
    together = run(**arguments, **options)
    for row in {0, case.rows - 1}:
        mine = dict(arguments)
        for key in {"x", "x_codes", "x_scales"} & arguments.keys():
            mine[key] = None if mine[key] is None else mine[key][row : row + 1]
        if not torch.equal(run(**mine, **options)[0], together[row]):
            raise Mismatch(f"row {row} alone has other bits")


def options_of(case: Case, kernels: ModuleType) -> Arguments:
    """Keyword arguments that choose a tile."""
    options: Arguments = {}
    if case.tile is not None:
        block_out, block_rows, block_in, splits = case.tile
        options["config"] = kernels.Config(block_out, block_rows, block_in, splits=splits)
    if case.kind != "int8":  # always invariant
        options["batch_invariant"] = case.batch_invariant
    return options


def inputs(case: Case, device: str) -> tuple[str, Arguments, Tensor]:
    """The launcher's name, its tensors, and the dense weight in float64 on the CPU."""
    rng = generator(1000 * case.seed + 7)
    x = activations(case, rng, device)
    bias = surrounded(normal(rng, (case.num_out,), case.dtype, device)) if case.bias else None
    if case.kind == "int4":
        arguments, weight = four_bits(case, rng, device)
        return "int4_linear", {"x": x, "bias": bias} | arguments, weight
    codes, dense = eight_bits(case, rng, device)
    if case.kind == "int8":
        scales = surrounded(normal(rng, (case.num_out,), FP32, device, 0.01))
        x_codes, x_scales = quantized_reference.quantize_rows(x)
        arguments = {"x_codes": wide(x_codes, case.view), "x_scales": surrounded(x_scales)}
        arguments |= {"codes": codes, "scales": scales, "dtype": case.dtype}
        return "int8_linear", {"bias": bias} | arguments, dense * scales.double().cpu()[:, None]
    rows, columns = case.block
    shape = -(-case.size // columns), -(-case.num_out // rows)
    scales = surrounded(normal(rng, shape, FP32, device, 0.05))
    arguments = {"x": x, "codes": codes, "scales": scales, "block": case.block, "bias": bias}
    if case.kind == "e4m3 rows":
        x_codes, x_scales = quantized_reference.quantize_rows(x, E4M3)
        arguments |= {"x": wide(x_codes, case.view), "x_scales": surrounded(x_scales)}
        arguments["dtype"] = case.dtype
    spread = quantized_reference.by_column(
        scales.double().cpu(), *case.block, (case.num_out, case.size)
    )
    return "scaled_linear", arguments, dense * spread


def activations(case: Case, rng: torch.Generator, device: str) -> Tensor:
    """Random rows that differ by powers of two, with NaN between them if `view`."""
    gap = 16 if case.view else 0
    place = guarded((case.rows, case.size + gap), case.dtype, device).view[:, : case.size]
    place.copy_(normal(rng, (case.rows, case.size), case.dtype, device))
    place *= 2.0 ** (torch.arange(case.rows, device=device) % 3).to(case.dtype)[:, None]
    return place


def surrounded(values: Tensor) -> Tensor:
    """The same numbers between guard bands."""
    if not values.is_floating_point():
        return wide(values, True, whole=True)
    return guarded(values.shape, values.dtype, str(values.device)).view.copy_(values)


def wide(codes: Tensor, view: bool, whole: bool = False) -> Tensor:
    """The same codes in rows with poison after each (`view`), or once after all (`whole`)."""
    bits = codes.view(torch.uint8)
    flat = bits.reshape(1, -1) if whole else bits
    memory = bits.new_full((len(flat), flat.shape[1] + 32 * view), POISON)
    memory[:, : flat.shape[1]] = flat
    return memory[:, : flat.shape[1]].view(codes.dtype).view(codes.shape if whole else flat.shape)


def four_bits(case: Case, rng: torch.Generator, device: str) -> tuple[Arguments, Tensor]:
    """Codes, scales (some negative, as AutoRound's) and offsets of 4-bit groups."""
    shape, group = (case.num_out, case.size), case.block[1]
    codes = torch.randint(0, 16, shape, generator=rng)
    scale_type = FP16 if case.seed % 2 else (BF16 if case.dtype == BF16 else FP32)
    groups = (case.size // group, case.num_out)
    scales = normal(rng, groups, scale_type, device, 0.05)
    arguments: Arguments = {
        "codes": wide(quantized_reference.interleave(codes).to(device), case.view),
        "scales": surrounded(scales),
    }

    def spread(values: Tensor) -> Tensor:
        return values.double().cpu().T.repeat_interleave(group, 1)

    numbers = codes.double()
    if case.offset == "zeros":
        zeros = torch.randint(-4, 21, groups, generator=rng).to(torch.int8).to(device)
        arguments["zeros"], numbers = surrounded(zeros), numbers - spread(zeros)
    dense = numbers * spread(scales)
    if case.offset == "minima":
        minima = normal(rng, groups, scale_type, device, 0.5)
        arguments["minima"], dense = surrounded(minima), dense + spread(minima)
    return arguments, dense


def eight_bits(case: Case, rng: torch.Generator, device: str) -> tuple[Tensor, Tensor]:
    """Codes [out, in] of all sizes, and their values in float64 on the CPU."""
    shape = case.num_out, case.size
    if case.kind.startswith("int8"):
        codes = torch.randint(-127, 128, shape, generator=rng).to(torch.int8)
    else:
        bits = torch.randint(0, 127, shape, generator=rng).to(torch.uint8)  # without NaN
        bits |= (torch.randint(0, 2, shape, generator=rng) << 7).to(torch.uint8)
        codes = bits.view(E4M3)
    return wide(codes.to(device), case.view), codes.float().double()


def dense_rows(arguments: Arguments) -> Tensor:
    """The rows of activations in float64."""
    x = arguments.get("x", arguments.get("x_codes"))
    scales = arguments.get("x_scales")
    rows: Tensor = x.float().double()  # type: ignore[union-attr]
    return rows if scales is None else rows * scales.double()[:, None]


def verify_rounding(case: Case, device: str, kernels: ModuleType) -> None:
    """`quantize_rows` with the bits of the reference; the last row has NaN, the one before is 0."""
    x = activations(case, generator(case.seed + 11), device)
    if case.rows > 2 and case.size:
        x[-2], x[-1, case.size // 2] = 0.0, torch.nan
    for kind in (torch.int8, E4M3):
        expected = quantized_reference.quantize_rows(x, kind)
        codes, scales = kernels.quantize_rows(x, kind)
        known = expected[1].isfinite()
        for name, got, due in (("scales", scales, expected[1]), ("codes", codes, expected[0])):
            got, due = (each.float().nan_to_num(1e9) for each in (got, due))
            if name == "codes":
                got, due = got[known], due[known]
            if not torch.equal(got, due):
                raise Mismatch(f"{name} of {kind} differ from the reference")


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
INT8 = (
    *(Case("int8", rows, 48, 300, dtype, bias=True) for rows in (1, 20) for dtype in DTYPES),
    Case("int8", 66, 100, 200, FP32, view=True),
    Case("int8", 3, 30, 700, FP32, bias=True, tile=(16, 16, 32, 5), view=True),
    Case("int8", 2, 7, 1, FP32),
    Case("int8", 0, 8, 32),
    Case("int8", 3, 0, 32),
)
SCALED = (
    *(Case("e4m3", 3, 48, 200, dtype, (1, 200), bias=True) for dtype in DTYPES),
    *(Case("e4m3", rows, 200, 300, block=(128, 128)) for rows in (1, 70)),
    *(Case("int8 blocks", 3, 40, 160, dtype, (1, 32), view=True) for dtype in DTYPES),
    *(Case("e4m3 rows", rows, 150, 260, dtype, (128, 128), bias=True)
      for rows, dtype in ((1, BF16), (18, FP32), (3, FP16))),
    Case("e4m3 rows", 4, 40, 100, FP32, (1, 100), view=True),
    Case("e4m3", 2, 100, 500, FP32, (32, 64), bias=True, tile=(16, 16, 32, 3), view=True),
    Case("e4m3 rows", 2, 20, 700, FP32, (1, 700), bias=True, tile=(16, 16, 64, 3)),
    Case("e4m3", 4, 66, 1100, FP16, (1, 1100), batch_invariant=True),
    Case("e4m3", 0, 8, 32),
    Case("e4m3", 3, 0, 32),
)  # fmt: skip
ROUND = (
    *(Case("round", 5, 1, size, dtype) for dtype in DTYPES for size in (1, 300)),
    Case("round", 4, 1, 5000, view=True),
    Case("round", 0, 1, 8),
)
CASES: tuple[Case, ...] = (*INT4, *INT8, *SCALED, *ROUND)


def random_case(rng: random.Random) -> Case:
    """Any case."""
    kinds: tuple[Kind, ...] = ("int4", "int4", "int8", "e4m3", "int8 blocks", "e4m3 rows", "round")
    kind = rng.choice(kinds)
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


def _int4(rows: int, num_out: int, size: int, group: int, dtype: torch.dtype, offset: str) -> Any:
    def run() -> object:
        x = torch.empty(rows, size, dtype=dtype)
        codes = torch.empty(num_out, size // 2, dtype=torch.uint8)
        scales = torch.empty(size // group, num_out, dtype=FP16)
        offsets: Arguments = {offset: scales.to(torch.int8) if offset == "zeros" else scales}
        return quantized.int4_linear(x, codes, scales, **offsets)

    return run


def _int8(rows: int, num_out: int, size: int) -> Callable[[], object]:
    def run() -> object:
        x_codes, x_scales = quantized.quantize_rows(torch.empty(rows, size, dtype=BF16))
        codes = torch.empty(num_out, size, dtype=torch.int8)
        return quantized.int8_linear(x_codes, x_scales, codes, torch.empty(num_out))

    return run


def _scaled(
    rows: int, num_out: int, size: int, block: tuple[int, int], codes: torch.dtype = E4M3
) -> Callable[[], object]:
    def run() -> object:
        x = torch.empty(rows, size, dtype=BF16)
        scales = torch.empty(-(-size // block[1]), -(-num_out // block[0]))
        weight = torch.empty(num_out, size, dtype=codes)
        return quantized.scaled_linear(x, weight, scales, block=block)

    return run


def _e4m3_rows(rows: int, num_out: int, size: int, block: tuple[int, int]) -> Callable[[], object]:
    def run() -> object:
        x, x_scales = quantized.quantize_rows(torch.empty(rows, size, dtype=BF16), E4M3)
        scales = torch.empty(-(-size // block[1]), -(-num_out // block[0]))
        weight = torch.empty(num_out, size, dtype=E4M3)
        return quantized.scaled_linear(x, weight, scales, block=block, x_scales=x_scales)

    return run


def _launch(name: str, run: Callable[[], object], units: bool = True) -> Launch:
    return Launch(name, run, tensor_cores=ARCHITECTURES if units else ())


LAUNCHES: tuple[Launch, ...] = (
    _launch("int4 g128 Llama-3.1-8B down 1", _int4(1, 4096, 14336, 128, BF16, "zeros")),
    _launch("int4 g128 Llama-3.1-8B down 64", _int4(64, 4096, 14336, 128, FP16, "zeros")),
    _launch("int4 g128 Llama-3.1-8B gate_up 2048", _int4(2048, 28672, 4096, 128, BF16, "zeros")),
    _launch("int4 g32 Qwen3-0.6B qkv 8", _int4(8, 4096, 1024, 32, BF16, "minima")),
    _launch("int4 equality tests", _int4(8, 1024, 1024, 64, FP32, "zeros"), units=False),
    _launch("int8 Llama-3.1-8B down 1", _int8(1, 4096, 14336)),
    _launch("int8 Llama-3.1-8B gate_up 2048", _int8(2048, 28672, 4096)),
    _launch("e4m3 channels Llama-3.1-8B down 1", _scaled(1, 4096, 14336, (1, 14336))),
    _launch("e4m3 blocks DeepSeek-V3 q_b 8", _scaled(8, 24576, 1536, (128, 128))),
    _launch("e4m3 blocks DeepSeek-V3 q_b 2048", _scaled(2048, 24576, 1536, (128, 128))),
    _launch("e4m3 rows DeepSeek-V3 q_b 8", _e4m3_rows(8, 24576, 1536, (128, 128))),
    _launch("e4m3 rows DeepSeek-V3 q_b 2048", _e4m3_rows(2048, 24576, 1536, (128, 128))),
    _launch("Q8_0 Qwen3-0.6B o 4", _scaled(4, 1024, 2048, (1, 32), torch.int8)),
)
