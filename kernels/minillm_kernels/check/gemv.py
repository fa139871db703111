"""Cases of the products of few rows (`gemv.py`), and launches of real models' layers."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import gemv, reference
from minillm_kernels.check.case import (
    Launch,
    Mismatch,
    blank,
    compare,
    compare_products,
    generator,
    guarded,
    in_rows,
    normal,
    short,
    surrounded,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)


@dataclass(frozen=True)
class Case:
    """One call: x [rows, size], weight [num_out, size].

    Attributes:
        norm: `norm_linear`, of x plus a residual if `residual`; `gated`: its outputs are
            gate and up of SwiGLU.
        view: x and weight are parts of wider rows.
        tile: another `Config`, as block_out, block_in, splits, and rows of x.
        scale: of x; small, so that eps decides.
    """

    rows: int
    num_out: int
    size: int
    dtype: torch.dtype = BF16
    norm: bool = False
    residual: bool = False
    gated: bool = False
    bias: bool = False
    view: bool = False
    batch_invariant: bool = False
    tile: tuple[int, ...] | None = None
    scale: float = 1.0
    eps: float = 1e-6
    seed: int = 0


def verify(case: Case, device: str = "cpu", kernels: ModuleType = gemv) -> None:
    """Run the case with the launchers of `kernels`; Mismatch if they are wrong."""
    rng, gap = generator(case.seed), 8 if case.view else 0

    def numbers(*shape: int, scale: float = 1.0) -> Tensor:
        return normal(rng, shape, case.dtype, device, scale)

    x = in_rows(numbers(case.rows, case.size, scale=case.scale), gap, powers=True)
    weight = in_rows(numbers(case.num_out, case.size), gap)
    bias = surrounded(numbers(case.num_out)) if case.bias else None
    norm_weight = surrounded(numbers(case.size)) if case.norm else None
    residual = surrounded(numbers(case.rows, case.size)) if case.residual else None
    out = guarded((case.rows, case.num_out // (1 + case.gated)), case.dtype, device)
    options: dict[str, Any] = {"out": out.view, "batch_invariant": case.batch_invariant}
    if case.tile is not None:
        block_out, block_in, splits, *rows = case.tile
        more = {"block_rows": rows[0]} if rows else {}
        options["config"] = kernels.Config(block_out, block_in, splits=splits, **more)
    product = (weight.double().cpu(), None if bias is None else bias.double().cpu())
    factors = x.double().cpu()
    if norm_weight is None:
        kernels.linear(x, weight, bias, **options)
    else:
        before = (x, residual, norm_weight, case.eps)
        _, total = kernels.norm_linear(*before, weight, bias, gated=case.gated, **options)
        if not torch.equal(total, x if residual is None else x + residual):
            raise Mismatch("the sum is not x plus the residual, rounded")
        factors = total.double().cpu()
        factors = reference.rms_norm(factors, norm_weight.double().cpu(), case.eps)
    out.check()
    expected = reference.linear(factors, *product)
    if case.gated:
        spread = (factors**2 @ product[0].T ** 2).amax() if expected.numel() else 0.0
        compare(out.view, reference.silu_mul(expected), "gated", floor=max(1e-3, float(spread)))
        return
    compare_products(out.view, expected, factors, product[0], floor=1e-3)


CASES: tuple[Case, ...] = (
    *(Case(1, 48, 256, dtype) for dtype in DTYPES),
    *(Case(5, 48, 256, dtype) for dtype in DTYPES),
    *(Case(rows, 33, 200, FP32, bias=True) for rows in (1, 2, 4, 8, 15, 16)),
    *(Case(rows, 70, 264, norm=True, bias=True) for rows in (1, 3, 16)),
    *(Case(rows, 40, 96, dtype, norm=True) for rows in (1, 4) for dtype in (FP32, FP16)),
    *(Case(rows, 1, 1, FP32) for rows in (1, 2)),
    *(Case(rows, 17, 1500, norm=True, view=True) for rows in (1, 6)),  # the last tile is not full
    *(Case(rows, 130, 40, FP16, view=True, bias=True) for rows in (1, 7)),
    *(Case(rows, 24, 128, FP32, norm=True, scale=1e-3, eps=1e-5) for rows in (1, 3)),
    *(Case(rows, 24, 128, norm=True, scale=0.0, bias=True) for rows in (1, 3)),
    *(Case(rows, 20, 64, FP16, norm=True, scale=3000.0) for rows in (1, 4)),  # fp16 ends at 65504
    *(Case(1, 40, 300, dtype, norm=True, batch_invariant=True) for dtype in DTYPES),
    Case(1, 21, 700, FP32, tile=(4, 64, 1)),
    Case(3, 100, 1100, bias=True, tile=(32, 128, 4)),  # splits of 384, the last one shorter
    Case(2, 20, 1025, FP32, norm=True, bias=True, tile=(16, 64, 8)),
    Case(16, 9, 130, FP16, tile=(16, 64, 16)),  # more splits than tiles
    Case(9, 65, 2100, norm=True, view=True),  # splits of its own
    *(Case(rows, 50, 200, dtype, norm=True, residual=True) for rows in (1, 5) for dtype in DTYPES),
    *(
        Case(rows, 130, 90, dtype, norm=True, residual=True, gated=True, bias=True)
        for rows in (1, 4)
        for dtype in DTYPES
    ),
    Case(1, 22, 1500, norm=True, residual=True, gated=True, view=True, tile=(1, 64, 1)),
    Case(9, 70, 2100, norm=True, residual=True, gated=True, tile=(16, 128, 4)),
    # More than one tile of rows, the last one not full; as the engine has them, and with splits.
    *(
        Case(rows, 72, 90, BF16, True, True, gated, bias=not gated)
        for rows, gated in ((9, False), (17, True), (40, False), (64, True), (130, True))
    ),
    *(
        Case(rows, 36, 600, dtype, True, True, gated, bias=True, tile=(32, 64, 3, 16))
        for rows, dtype, gated in ((40, BF16, True), (33, FP16, False), (20, FP32, True))
    ),
    Case(70, 40, 300, BF16, True, True, view=True, tile=(16, 128, 2, 32)),
    Case(35, 20, 64, FP16, norm=True, scale=3000.0, tile=(16, 32, 2, 32)),
    Case(40, 48, 256, bias=True, tile=(32, 64, 2, 32)),
    Case(33, 40, 300, norm=True, batch_invariant=True),
    Case(0, 8, 16),
    Case(3, 0, 16),
    Case(2, 0, 16, norm=True, residual=True),
)


def random_case(rng: random.Random) -> Case:
    """Any case."""
    several = rng.random() < 0.6
    norm, bias, view, batch_invariant, more = (rng.random() < 0.5 for _ in range(5))
    gated = norm and rng.random() < 0.5
    tile: tuple[int, ...] | None = None
    if rng.random() < 0.5:
        tile = (rng.choice((16, 32, 64)), rng.choice((32, 64, 256)), rng.randint(1, 6))
        tile = (*tile, rng.choice((16, 32, 64)))
    return Case(
        rng.choice((rng.randint(0, 16), rng.randint(17, 100))) if several else 1,
        rng.choice((1, 8, rng.randint(1, 200))) * (1 + gated),
        rng.choice((1, 64, rng.randint(1, 600), 8 * rng.randint(1, 200))),
        rng.choice(DTYPES),
        norm,
        norm and more,
        gated,
        bias,
        view,
        batch_invariant,
        tile=tile,
        scale=rng.choice((1e-3, 1.0, 30.0)),
        eps=rng.choice((1e-6, 1e-5)),
        seed=rng.randrange(2**20),
    )


# ---- real models, to be compiled -------------------------------------------------------------

ARCHITECTURES = (80, 90, 100)


def _launch(
    name: str,
    rows: int,
    num_out: int,
    size: int,
    norm: bool = False,
    gated: bool = False,
    dtype: torch.dtype = BF16,
) -> Launch:
    """A layer of a model; matrix units where there are several rows in half precision."""
    x, weight = blank(rows, size, dtype=dtype), blank(num_out, size, dtype=dtype)
    run: Callable[[], object] = partial(gemv.linear, x, weight)
    if norm:
        run = partial(gemv.norm_linear, x, x, x[0], 1e-6, weight, gated=gated)
    return Launch(
        f"{'norm_linear' if norm else 'linear'} {name} {rows}x{size}x{num_out} {short(dtype)}"
        + " gated" * gated,
        run,
        tensor_cores=ARCHITECTURES if rows > 1 and dtype != FP32 else (),
    )


def _with_bias(rows: int) -> Launch:
    x, weight, bias = blank(rows, 896), blank(1152, 896), blank(1152)
    run = partial(gemv.norm_linear, x, x, x[0], 1e-6, weight, bias)
    name = f"norm_linear Qwen2.5-0.5B qkv with bias {rows}"
    return Launch(name, run, ARCHITECTURES if rows > 1 else ())


LAUNCHES: tuple[Launch, ...] = (
    _launch("Llama-3.1-8B qkv", 1, 6144, 4096, norm=True),
    _launch("Llama-3.1-8B down", 1, 4096, 14336),
    _launch("Llama-3.1-8B down", 1, 4096, 14336, dtype=FP16),
    _launch("Llama-3.1-8B gate_up", 1, 28672, 4096, norm=True, gated=True),
    _launch("Qwen3-0.6B qkv", 1, 4096, 1024, norm=True),
    _launch("Qwen3-0.6B gate_up", 1, 6144, 1024, norm=True, gated=True),
    _launch("Qwen3-0.6B o", 1, 1024, 2048),
    _launch("Qwen3-30B-A3B router", 1, 128, 2048),
    _launch("Llama-3.1-8B qkv", 8, 6144, 4096, norm=True),
    _launch("Llama-3.1-8B qkv", 8, 6144, 4096, norm=True, dtype=FP16),
    _launch("Llama-3.1-8B gate_up", 4, 28672, 4096, norm=True, gated=True),
    _launch("Qwen3-0.6B gate_up", 8, 6144, 1024, norm=True, gated=True),
    _launch("Llama-3.1-8B down", 16, 4096, 14336),
    _launch("Qwen3-0.6B o", 16, 1024, 2048),
    # 8 bytes; the engine uses float32 in tests only.
    replace(_launch("equality tests", 1, 1024, 1024, norm=True, dtype=FP32), may_spill=(100,)),
    _launch("equality tests", 8, 1024, 1024, norm=True, dtype=FP32),
    _with_bias(1),
    _with_bias(4),
    _launch("Llama-3.1-8B qkv", 32, 6144, 4096, norm=True),
    _launch("Llama-3.1-8B gate_up", 64, 28672, 4096, norm=True, gated=True),
    _launch("Qwen3-0.6B qkv", 64, 4096, 1024, norm=True),
    _launch("Qwen3-0.6B gate_up", 32, 6144, 1024, norm=True, gated=True),
    _launch("Qwen3-0.6B gate_up", 256, 6144, 1024, norm=True, gated=True),
    _with_bias(64),
)
