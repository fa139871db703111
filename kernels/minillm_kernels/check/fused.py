"""Cases of norms, SwiGLU and embedding (`fused.py`); those of `rope_cache.py` are added to them."""

import random
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from minillm_kernels import fused, reference
from minillm_kernels.check import rope_cache
from minillm_kernels.check.case import (
    Launch,
    Mismatch,
    blank,
    generator,
    guarded,
    short,
    surrounded,
)
from minillm_kernels.check.rope_cache import BF16, DTYPES, FP16, FP32, Case

WRONG_IDS = (-1, -(2**31), 2**31 - 1)


@dataclass(frozen=True)
class Norm(Case):
    """`rms_norm` of this shape; of heads inside wider rows, if `view`."""

    shape: tuple[int, ...]
    view: bool = False
    scale: float = 1.0  # small: eps decides; 0: nothing but eps
    eps: float = 1e-6

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference."""
        x = self.numbers(1, self.shape, device, self.scale)
        if self.view:  # [N, H, d] inside [N, H + 3, d + 8]
            rows, heads, size = self.shape
            x = self.numbers(1, (rows, heads + 3, size + 8), device, self.scale)
            x = x[:, 2 : 2 + heads, :size]
        weight = self.numbers(2, self.shape[-1:], device)
        out = guarded(self.shape, self.dtype, device)
        kernels.rms_norm(x, weight, self.eps, out=out.view)
        out.check()
        expected = reference.rms_norm(x.double().cpu(), weight.double().cpu(), self.eps)
        self.compare(out.view, expected, "norm")


@dataclass(frozen=True)
class AddNorm(Case):
    """`add_rms_norm` of `rows` x `size`; `in_place` overwrites its inputs."""

    rows: int
    size: int
    in_place: bool = False
    scale: float = 1.0
    eps: float = 1e-6

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference."""
        shape = (self.rows, self.size)
        x = self.numbers(1, shape, device, self.scale)
        residual = self.numbers(2, shape, device, self.scale)
        weight = self.numbers(3, shape[1:], device)
        total = (x + residual).cpu()  # the sum of two numbers has one right rounding
        expected = reference.rms_norm(total.double(), weight.double().cpu(), self.eps)
        out, sums = guarded(shape, self.dtype, device), guarded(shape, self.dtype, device)
        places = (x, residual) if self.in_place else (out.view, sums.view)
        got = kernels.add_rms_norm(
            x, residual, weight, self.eps, out=places[0], residual_out=places[1]
        )
        if not self.in_place:
            out.check()
            sums.check()
        for found, place in zip(got, places, strict=True):
            if found.data_ptr() != place.data_ptr():
                raise Mismatch("a result is not where it was asked for")
        self.compare(got[1], total.double(), "sum", exact=True)
        self.compare(got[0], expected, "norm")


@dataclass(frozen=True)
class Swiglu(Case):
    """`silu_mul` of `rows` x 2 `size`."""

    rows: int
    size: int
    scale: float = 1.0

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference."""
        gate_up = self.numbers(1, (self.rows, 2 * self.size), device, self.scale)
        out = guarded((self.rows, self.size), self.dtype, device)
        kernels.silu_mul(gate_up, out=out.view)
        out.check()
        self.compare(out.view, reference.silu_mul(gate_up.double().cpu()), "product")


@dataclass(frozen=True)
class Embedding(Case):
    """`embedding` of `rows` ids in a table of `vocab` x `size`; some outside of it, if `wrong`."""

    rows: int
    vocab: int
    size: int
    ids: torch.dtype = torch.int64
    wrong: bool = False

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference, which gets a table with a row of zeros for wrong ids."""
        table = self.numbers(1, (self.vocab, self.size), device)
        ids = torch.randint(self.vocab, (self.rows,), generator=generator(self.seed))
        known = ids.clone()
        if self.wrong:
            for place, wrong in enumerate((self.vocab, *WRONG_IDS)):
                known[place::7], ids[place::7] = self.vocab, wrong
        out = guarded((self.rows, self.size), self.dtype, device)
        kernels.embedding(surrounded(ids.to(self.ids).to(device)), table, out=out.view)
        out.check()
        padded = torch.cat((table.double().cpu(), torch.zeros(1, self.size).double()))
        self.compare(out.view, reference.embedding(known, padded), "vectors", exact=True)


CASES: tuple[Case, ...] = (
    *(Norm((5, 48), dtype=dtype) for dtype in DTYPES),
    *(Norm((3, size), dtype=FP32) for size in (1, 8, 127, 1024, 5120)),
    Norm((70, 1024)),  # more rows than a program has
    Norm((2, 16384)),  # the longest row in registers
    *(Norm((2, 16392), dtype=dtype) for dtype in DTYPES),  # in a loop
    Norm((2, 3, 24), view=True),
    Norm((3, 5, 128), view=True, dtype=FP32),  # q/k norm inside of qkv
    Norm((2, 2, 20000), view=True, dtype=FP16),
    Norm((2, 3, 2, 2, 16), dtype=FP32),
    Norm((40,), dtype=FP32),
    Norm((4, 64), scale=1e-3, eps=1e-5, dtype=FP32),
    Norm((4, 64), scale=1e4),
    Norm((3, 64), scale=0.0),
    Norm((2, 20000), scale=1e-3, eps=1e-5, dtype=FP32),
    Norm((0, 64)),
    *(AddNorm(5, 48, dtype=dtype) for dtype in DTYPES),
    *(AddNorm(3, size, in_place=in_place) for size in (896, 20000) for in_place in (False, True)),
    AddNorm(70, 1024, scale=100.0, dtype=FP16),
    AddNorm(2, 16400, scale=1e-3, eps=1e-5, dtype=FP32),
    AddNorm(2, 300, scale=0.0, dtype=FP32),
    AddNorm(0, 16),
    *(Swiglu(5, 48, dtype=dtype) for dtype in DTYPES),
    *(Swiglu(3, size, scale=30.0) for size in (1, 8, 768, 2500, 5632)),
    Swiglu(300, 260, dtype=FP32),
    Swiglu(2, 64, scale=1e4, dtype=FP32),
    Swiglu(0, 64),
    *(Embedding(9, 11, 48, dtype=dtype) for dtype in DTYPES),
    *(Embedding(3, 5, size, ids=torch.int32) for size in (1, 8, 1000, 4096)),
    Embedding(40, 5, 24, wrong=True),
    Embedding(20, 3, 2560, ids=torch.int32, wrong=True, dtype=FP32),
    Embedding(0, 3, 16),
    *rope_cache.CASES,
)


def random_case(rng: random.Random) -> Case:
    """Any case of one of the operations."""
    kind = rng.randrange(6)
    if kind >= 4:
        return rope_cache.random_case(rng)
    dtype, seed = rng.choice(DTYPES), rng.randrange(2**20)
    rows = rng.choice((0, 1, 2, 3, 7, 33, 65))
    size = rng.choice((rng.randint(1, 300), rng.randint(1, 40) * 64, rng.randint(16000, 17000)))
    scale = rng.choice((1e-3, 1.0, 1000.0))
    eps = rng.choice((1e-6, 1e-5))
    if kind == 0:
        view = rng.random() < 0.5 and size < 3000
        shape = (rows, rng.randint(1, 4), size) if view else (rows, size)
        return Norm(shape, view, scale, eps, dtype=dtype, seed=seed)
    if kind == 1:
        return AddNorm(rows, size, rng.random() < 0.5, scale, eps, dtype=dtype, seed=seed)
    if kind == 2:
        return Swiglu(rows, size, min(scale, 30.0), dtype=dtype, seed=seed)
    ids, vocab = rng.choice((torch.int32, torch.int64)), rng.randint(1, 50)
    return Embedding(rows, vocab, size, ids, rng.random() < 0.5, dtype=dtype, seed=seed)


def verify(case: Case, device: str = "cpu", kernels: ModuleType = fused) -> None:
    """Run the case with the launchers of `kernels`; Mismatch if they are wrong."""
    case.run(device, kernels)


# ---- real models, to be compiled -------------------------------------------------------------

TOKENS = 64


def _launch(operation: str, size: int, dtype: torch.dtype = BF16) -> Launch:
    """An operation on rows of `size` numbers."""
    x, weight = blank(TOKENS, size, dtype=dtype), blank(size, dtype=dtype)
    arguments: dict[str, tuple[object, ...]] = {
        "rms_norm": (x, weight, 1e-6),
        "add_rms_norm": (x, x, weight, 1e-6),
        "silu_mul": (blank(TOKENS, 2 * size, dtype=dtype),),
        "embedding": (blank(TOKENS, dtype=torch.int64), blank(1024, size, dtype=dtype)),
    }
    run = partial(getattr(fused, operation), *arguments[operation])
    return Launch(f"{operation} {size} {short(dtype)}", run)


LAUNCHES: tuple[Launch, ...] = (
    _launch("rms_norm", 128),  # q/k norm
    *(_launch("add_rms_norm", size) for size in (1024, 4096, 7168, 16384)),
    _launch("rms_norm", 32768),  # in a loop
    _launch("add_rms_norm", 4096, FP32),
    _launch("add_rms_norm", 16384, FP32),
    _launch("silu_mul", 14336),
    _launch("silu_mul", 768, FP16),
    _launch("silu_mul", 3072, FP32),
    _launch("embedding", 4096),
    *rope_cache.LAUNCHES,
)
