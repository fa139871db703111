"""Cases of the rotation and the KV write (`rope_cache.py`), and what all cases of `fused.py` share.

Inputs and outputs lie between guard bands, caches are NaN where nothing may be written, and what is
expected comes from `reference.py` in float64.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import reference, rope_cache
from minillm_kernels.check.case import (
    Guarded,
    Launch,
    Mismatch,
    blank,
    compare,
    generator,
    guarded,
    normal,
    short,
    surrounded,
)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)
# These kernels round once or twice and add little up: less than the common tolerance will do.
ROUNDED: Mapping[torch.dtype, float] = MappingProxyType({FP32: 5e-6, FP16: 1.5e-3, BF16: 1.2e-2})


@dataclass(frozen=True, kw_only=True)
class Case(ABC):
    """One call of one launcher; `run` compares it with the reference."""

    dtype: torch.dtype = BF16
    seed: int = 0

    @abstractmethod
    def run(self, device: str, kernels: ModuleType) -> None:
        """Raise Mismatch if the launcher of `kernels` is wrong."""

    def numbers(self, salt: int, shape: Sequence[int], device: str, scale: float = 1.0) -> Tensor:
        """Random numbers between guard bands of NaN."""
        rng = generator(1000 * self.seed + salt)
        return surrounded(normal(rng, shape, self.dtype, device, scale))

    def angles(self, rows: int, dim: int, device: str) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, dim / 2] of any angles."""
        turns = torch.rand(rows, dim // 2, generator=generator(1000 * self.seed + 99)) * 2 * math.pi
        return surrounded(turns.cos().to(device)), surrounded(turns.sin().to(device))

    def compare(self, got: Tensor, expected: Tensor, what: str, exact: bool = False) -> None:
        """Within this family's tolerance."""
        compare(got, expected, what, 0.0 if exact else ROUNDED[self.dtype])


def wide(tensor: Tensor | None) -> Tensor | None:
    """The rounded numbers in float64 on the CPU."""
    return None if tensor is None else tensor.double().cpu()


@dataclass(frozen=True)
class Rotation(Case):
    """`rotate` of `heads` of `dim`, which are the end of wider ones if `view` (MLA)."""

    rows: int
    heads: int
    dim: int
    interleaved: bool = False
    view: bool = False

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference."""
        before = 24 if self.view else 0
        x = self.numbers(1, (self.rows, self.heads, before + self.dim), device)[..., before:]
        cos, sin = self.angles(self.rows, self.dim, device)
        out = guarded(x.shape, self.dtype, device)
        kernels.rotate(x, cos, sin, self.interleaved, out=out.view)
        out.check()
        expected = reference.rotate(x.double().cpu(), cos.cpu(), sin.cpu(), self.interleaved)
        self.compare(out.view, expected, "rotated")


@dataclass(frozen=True, kw_only=True)
class Write(Case):
    """Rows that go to slots of a paged cache of NaN.

    Of the `rows`, the last `padding` have no entry in the slot mapping (if negative, there are
    more entries than rows), and those with a number in `skipped` have slot -1.
    """

    rows: int
    kv_heads: int
    dim: int
    block_size: int = 4
    padding: int = 0
    skipped: tuple[int, ...] = ()
    beyond: tuple[int, ...] = ()  # rows whose slot the cache does not have
    slots: torch.dtype = torch.int64
    token_major: bool = False  # the cache's layout in memory; its shape is the same

    @property
    def num_blocks(self) -> int:
        """Enough for every entry, and some that stay unwritten."""
        return -(-(self.rows - min(self.padding, 0)) // self.block_size) + 3

    def slot_mapping(self) -> Tensor:
        """Entries in no order, no two the same."""
        count = self.rows - self.padding
        order = torch.randperm(self.num_blocks * self.block_size, generator=generator(self.seed))
        slots = order[:count].clone()
        slots[[row for row in self.skipped if row < count]] = -1
        outside = [row for row in self.beyond if row < count]
        slots[outside] = self.num_blocks * self.block_size + torch.arange(len(outside))
        return slots

    def cache(self, dim: int, device: str) -> tuple[Guarded, Tensor]:
        """The guarded memory, and the cache [blocks, Hkv, block_size, dim] in it."""
        shape = [self.num_blocks, self.kv_heads, self.block_size, dim]
        if self.token_major:
            shape[1:3] = shape[2:0:-1]
        memory = guarded(shape, self.dtype, device)
        return memory, memory.view.transpose(1, 2) if self.token_major else memory.view

    def check_cache(self, memory: Guarded, cache: Tensor, expected: Tensor, what: str) -> None:
        """What had to be written is right; everything else is as it was."""
        memory.check(written=False)
        untouched = expected.isnan()
        if bool((cache.cpu().isnan() != untouched).any()):
            place = (cache.cpu().isnan() != untouched).nonzero()[0].tolist()
            raise Mismatch(f"{what} at {place} was written and must not be, or the other way")
        self.compare(cache.cpu()[~untouched], expected[~untouched], what)

    def expected_slots(self) -> Tensor:
        """As the reference takes them: a slot that does not exist is none."""
        slots = self.slot_mapping()
        return slots.masked_fill(slots >= self.num_blocks * self.block_size, -1)


@dataclass(frozen=True, kw_only=True)
class CacheWrite(Write):
    """`write_cache`; with a `value_dim` of 0 the values are a part of the keys (MLA)."""

    value_dim: int

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference."""
        heads = self.numbers(1, (self.rows, 2 * self.kv_heads + 1, self.dim), device)
        key = heads[:, 1 : 1 + self.kv_heads]
        shape = (self.rows, self.kv_heads, self.value_dim)
        value = self.numbers(2, shape, device) if self.value_dim else None
        k_memory, k_cache = self.cache(self.dim, device)
        v_memory, v_cache = self.cache(self.value_dim or 1, device)
        if value is None:
            v_cache = k_cache[..., : self.dim // 2]
        slots = surrounded(self.slot_mapping().to(self.slots).to(device))
        kernels.write_cache(key, value, k_cache, v_cache, slots)
        k_expected = torch.full(k_cache.shape, math.nan, dtype=torch.float64)
        v_expected = torch.full(v_cache.shape, math.nan, dtype=torch.float64)
        reference.write_cache(
            key.double().cpu(), wide(value), k_expected, v_expected, self.expected_slots()
        )
        self.check_cache(k_memory, k_cache, k_expected, "k_cache")
        if value is not None:
            self.check_cache(v_memory, v_cache, v_expected, "v_cache")


@dataclass(frozen=True, kw_only=True)
class Projection(Write):
    """`norm_rope_write` of `heads` query heads and `kv_heads`, normed if `norm`."""

    heads: int
    norm: bool = True
    interleaved: bool = False
    view: bool = False  # qkv is a part of a wider product
    scale: float = 1.0
    eps: float = 1e-6

    def run(self, device: str, kernels: ModuleType) -> None:
        """Compare with the reference."""
        shape = (self.rows, self.heads + 2 * self.kv_heads, self.dim)
        qkv = self.numbers(1, shape, device, self.scale)
        if self.view:
            wider = self.numbers(1, (self.rows, shape[1] + 2, self.dim + 8), device, self.scale)
            qkv = wider[:, 1:-1, 8:]
        q_weight = self.numbers(2, (self.dim,), device) if self.norm else None
        k_weight = self.numbers(3, (self.dim,), device) if self.norm else None
        cos, sin = self.angles(self.rows, self.dim, device)
        (k_memory, k_cache), (v_memory, v_cache) = (self.cache(self.dim, device) for _ in "kv")
        slots = surrounded(self.slot_mapping().to(self.slots).to(device))
        out = guarded((self.rows, self.heads, self.dim), self.dtype, device)
        turn = (self.eps, cos, sin, self.interleaved)
        kernels.norm_rope_write(
            qkv, q_weight, k_weight, *turn, k_cache, v_cache, slots, out=out.view
        )
        out.check()
        k_expected = torch.full(k_cache.shape, math.nan, dtype=torch.float64)
        v_expected = torch.full(v_cache.shape, math.nan, dtype=torch.float64)
        expected = reference.norm_rope_write(
            qkv.double().cpu(),
            wide(q_weight),
            wide(k_weight),
            *(self.eps, cos.cpu(), sin.cpu(), self.interleaved),
            *(k_expected, v_expected, self.expected_slots()),
        )
        self.compare(out.view, expected, "query")
        self.check_cache(k_memory, k_cache, k_expected, "k_cache")
        self.check_cache(v_memory, v_cache, v_expected, "v_cache")


CASES: tuple[Case, ...] = (
    *(Rotation(rows=3, heads=2, dim=16, dtype=dtype) for dtype in DTYPES),
    *(Rotation(rows=2, heads=3, dim=dim, interleaved=True, view=True) for dim in (8, 64, 80)),
    Rotation(rows=5, heads=1, dim=128, view=True, dtype=FP32),
    Rotation(rows=1, heads=2, dim=2, dtype=FP32),  # one pair
    Rotation(rows=300, heads=4, dim=96, dtype=FP16),  # several programs, the last one not full
    Rotation(rows=0, heads=2, dim=64),
    *(CacheWrite(rows=5, kv_heads=2, dim=16, value_dim=16, dtype=dtype) for dtype in DTYPES),
    CacheWrite(rows=6, kv_heads=1, dim=72, value_dim=0, block_size=16, skipped=(0, 5)),  # MLA
    CacheWrite(rows=7, kv_heads=3, dim=24, value_dim=40, padding=3, skipped=(1,), dtype=FP16),
    CacheWrite(rows=4, kv_heads=2, dim=8, value_dim=8, padding=-3, slots=torch.int32),
    CacheWrite(rows=6, kv_heads=2, dim=8, value_dim=16, token_major=True, beyond=(0, 3)),
    CacheWrite(rows=3, kv_heads=1, dim=576, value_dim=0, block_size=64, beyond=(2,)),
    CacheWrite(rows=3, kv_heads=4, dim=64, value_dim=64, padding=3),  # nothing to write
    *(
        Projection(rows=5, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, skipped=(1,))
        for dtype, heads, kv_heads, dim in ((FP32, 2, 1, 8), (FP16, 6, 2, 64), (BF16, 4, 4, 128))
    ),
    Projection(rows=4, heads=8, kv_heads=1, dim=80, view=True, padding=2, dtype=FP32),
    Projection(rows=7, heads=3, kv_heads=3, dim=96, interleaved=True, padding=-2, dtype=FP16),
    Projection(rows=3, heads=2, kv_heads=1, dim=256, block_size=1, dtype=FP32),
    Projection(rows=4, heads=7, kv_heads=1, dim=64, norm=False, token_major=True, view=True),
    Projection(rows=2, heads=4, kv_heads=2, dim=16, interleaved=True, beyond=(1,), dtype=FP32),
    Projection(rows=4, heads=2, kv_heads=2, dim=32, scale=1e-4, eps=1e-5, dtype=FP32),
    Projection(rows=3, heads=2, kv_heads=1, dim=16, scale=0.0, block_size=256),  # NaN without eps
    Projection(rows=130, heads=3, kv_heads=2, dim=256, block_size=16, padding=9),  # many programs
    Projection(rows=0, heads=2, kv_heads=1, dim=64),
)


def random_case(rng: random.Random) -> Case:
    """Any case of one of the three."""
    dtype, seed = rng.choice(DTYPES), rng.randrange(2**20)
    rows, heads, kv_heads = rng.randint(0, 40), rng.randint(1, 5), rng.randint(1, 4)
    dim = 8 * rng.choice((1, 2, 3, 5, 8, 9, 10, 12, 16, 32))
    interleaved, view = rng.random() < 0.5, rng.random() < 0.5
    kind = rng.choice(("rotation", "write", "projection", "projection"))
    if kind == "rotation":
        return Rotation(rows, heads, dim, interleaved, view, dtype=dtype, seed=seed)
    place: dict[str, Any] = {
        "block_size": rng.choice((1, 2, 3, 4, 8, 16, 64, 256)),
        "padding": rng.randint(-4, min(rows, 5)),
        "skipped": tuple(row for row in range(rows) if rng.random() < 0.2),
        "slots": rng.choice((torch.int32, torch.int64)),
        "token_major": rng.random() < 0.5,
        "dtype": dtype,
        "seed": seed,
    }
    if kind == "write":
        value_dim = rng.choice((0, dim, 8 * rng.randint(1, 20)))
        return CacheWrite(rows=rows, kv_heads=kv_heads, dim=dim, value_dim=value_dim, **place)
    scale = rng.choice((1e-3, 1.0, 100.0))
    layout: dict[str, Any] = {"norm": rng.random() < 0.7, "interleaved": interleaved, "view": view}
    return Projection(
        rows=rows, heads=heads, kv_heads=kv_heads, dim=dim, scale=scale, **layout, **place
    )


def verify(case: Case, device: str = "cpu", kernels: ModuleType = rope_cache) -> None:
    """Run the case with the launchers of `kernels`; Mismatch if they are wrong."""
    case.run(device, kernels)


# ---- real models, to be compiled -------------------------------------------------------------

TOKENS, BLOCKS, BLOCK_SIZE = 64, 32, 16


def _projection(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, norm: bool, turned: bool
) -> Launch:
    """`norm_rope_write` of one layer of a model."""
    weight = blank(dim, dtype=dtype) if norm else None
    angles = blank(TOKENS, dim // 2, dtype=FP32)
    qkv = blank(TOKENS, heads + 2 * kv_heads, dim, dtype=dtype)
    cache = blank(BLOCKS, kv_heads, BLOCK_SIZE, dim, dtype=dtype)
    slots = blank(TOKENS, dtype=torch.int64)
    inputs = (qkv, weight, weight, 1e-6, angles, angles, turned, cache, cache, slots)
    run = partial(rope_cache.norm_rope_write, *inputs)
    return Launch(f"norm_rope_write {name} {short(dtype)}", run)


def _latent() -> tuple[Launch, Launch]:
    """DeepSeek's rotated query part, and its latent cache."""
    q, angles = blank(TOKENS, 16, 192)[..., 128:], blank(TOKENS, 32, dtype=FP32)
    cache, slots = blank(BLOCKS, 1, 64, 576), blank(TOKENS, dtype=torch.int64)
    turn = partial(rope_cache.rotate, q, angles, angles, True)
    key = blank(TOKENS, 1, 576)
    write = partial(rope_cache.write_cache, key, None, cache, cache[..., :512], slots)
    return Launch("rotate MLA 64 bfloat16", turn), Launch("write_cache MLA 576 bfloat16", write)


LAUNCHES: tuple[Launch, ...] = (
    _projection("Llama-3.1-8B", 32, 8, 128, BF16, norm=False, turned=False),
    _projection("Qwen3-0.6B", 16, 8, 128, BF16, norm=True, turned=False),
    _projection("Qwen3-0.6B", 16, 8, 128, FP16, norm=True, turned=False),
    _projection("Qwen3-0.6B", 16, 8, 128, FP32, norm=True, turned=False),
    _projection("Qwen2.5-0.5B", 14, 2, 64, BF16, norm=False, turned=False),
    _projection("interleaved", 32, 8, 128, BF16, norm=True, turned=True),
    _projection("head_dim 80", 32, 32, 80, BF16, norm=False, turned=False),
    _projection("head_dim 96", 32, 32, 96, BF16, norm=False, turned=False),
    _projection("head_dim 256", 8, 4, 256, BF16, norm=True, turned=False),
    *_latent(),
)
