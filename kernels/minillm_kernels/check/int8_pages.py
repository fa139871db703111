"""Cases of `minillm_kernels.int8_pages`: codes are written, then attended to, both with the bits of
`int8_cache`; and attention is near that of the rounded numbers, in float64."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import int8_cache, int8_pages, reference
from minillm_kernels.check.case import Launch, Mismatch, blank, compare, generator, normal
from minillm_kernels.check.pages import (
    UNTOUCHED,
    Inputs,
    Paged,
    guarded_call,
    inputs_of,
    random_sequences,
)

HALF, BRAIN = torch.float16, torch.bfloat16
ROUNDING = 0.03  # of weights to 7 bits, as a share of the largest result
Codes = tuple[Tensor, Tensor, Tensor, Tensor]
NAMES = ("key", "value", "key_scale", "value_scale")


@dataclass(frozen=True)
class Case:
    """One call: sequences as (query_len, seq_len), and sizes; `padding` counts rows behind the last
    sequence; if `bad`, a key, a value and a query are not finite. With `tree`, sequences of one
    query are paths of token trees."""

    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = BRAIN
    window: int | None = None
    padding: int = 0
    bad: bool = False
    max_query_len: int | None = None
    tree: bool = False
    seed: int = 0

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5


MIXED = ((1, 37), (7, 7), (0, 20), (1, 130), (40, 90))
EDGES = tuple((1, length) for length in (0, 1, 63, 64, 65, 128, 129))
CASES = (
    Case(MIXED, dtype=torch.float32, padding=2),
    Case(MIXED, 3, 1, 80, 4, HALF, window=33, seed=1),
    Case(EDGES, 2, 1, block_size=64, max_query_len=1, padding=1, seed=2),
    Case(EDGES, 8, 1, 256, 256, dtype=HALF, max_query_len=1, window=64, seed=3),
    Case(((5, 300), (1, 140), (16, 16), (0, 4)), 4, 1, 64, max_query_len=16, seed=4),
    Case(((1, 1700), (3, 1030)), 2, 1, max_query_len=3, dtype=torch.float32, seed=5),  # both sizes
    Case(((1, 1700), (70, 1100)), 1, 1, block_size=12, window=600, seed=6),
    Case(((2, 70), (1, 40), (3, 0)), 5, 1, 128, 20, HALF, seed=7),
    Case(((1, 5), (9, 70)), 40, 1, 16, block_size=8, seed=8),
    Case(((90, 90), (1, 30)), 2, 2, bad=True, seed=9),
    Case(((2, 150), (1, 80)), 2, 1, max_query_len=2, bad=True, seed=10),
    Case(((1, 70), (1, 128), (1, 0), (3, 40), (1, 190)), 4, 1, 64, max_query_len=3, tree=True,
         seed=11),
    Case(((1, 1100), (70, 90), (1, 5)), 2, 1, block_size=12, window=90, tree=True, seed=12),
)  # fmt: skip


def random_case(rng: random.Random) -> Case:
    """Any call."""
    block_size, num_kv_heads = rng.choice((4, 12, 16, 64, 256)), rng.choice((1, 1, 2))
    return Case(
        **random_sequences(rng, block_size, 90),
        num_heads=num_kv_heads * rng.choice((1, 2, 3, 4, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((32, 64, 80, 96, 128, 256)),
        block_size=block_size,
        dtype=rng.choice((torch.float32, HALF, BRAIN)),
        window=rng.choice((None, None, rng.randint(1, 200))),
        padding=rng.choice((0, 0, 2)),
        seed=rng.randrange(2**31),
        tree=rng.random() < 0.4,
    )


def inputs(case: Case, device: str) -> Inputs:
    """Queries and pages of numbers of any size, some zero, with the positions of each sequence in
    order."""
    dims = case.head_dim, case.head_dim
    given = inputs_of(case, case.num_kv_heads, dims, case.head_dim, device)
    rng = generator(case.seed + 2)

    def uneven(cache: Tensor) -> Tensor:
        factor = 2.0 ** torch.randint(-3, 3, cache.shape[:3], generator=rng)
        factor *= torch.rand(factor.shape, generator=rng) >= 0.1
        return cache * factor.to(cache)[..., None]

    if case.bad:
        given.q[-1, 0, 0] = -math.inf
    caches = tuple(map(uneven, given.pages.caches))
    return replace(given, pages=replace(given.pages, caches=caches))


def rows_of(case: Case, pages: Paged) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [S, Hkv, D] of all positions and their slots, in any order: views of wider
    rows. One has no slot, and one is behind the slots."""
    rng = generator(case.seed + 3)
    rows = torch.cat([cache.cpu().transpose(1, 2).flatten(0, 1) for cache in pages.caches], 1)
    slots = rows[:, 0, 0].isfinite().nonzero().flatten()
    slots = torch.cat((slots, torch.tensor([-1])))[torch.randperm(len(slots) + 1, generator=rng)]
    wide = torch.cat((rows[slots], torch.full_like(rows[:1], math.nan)))
    if case.bad:
        wide[0, 0, 3], wide[1, -1, 0] = math.nan, math.inf
    device = pages.seq_lens.device
    key, value = wide.to(device).chunk(2, 1)
    return key, value, slots.to(device)


def garbage(case: Case, num_blocks: int, device: str) -> Codes:
    """Pages that hold nothing yet: any codes, and scales that are NaN."""
    rng, shape = generator(1), (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    codes = torch.randint(0, 256, shape, generator=rng)
    nan = torch.full(shape[:3], math.nan, dtype=HALF)
    pages = codes.byte(), codes.sub(128).to(torch.int8), nan, nan.clone()
    return tuple(page.to(device) for page in pages)  # type: ignore[return-value]


def near(codes: Tensor, scale: Tensor) -> Tensor:
    """The numbers that codes stand for, in float64."""
    return codes.double() * scale.double().unsqueeze(-1)


def same_bits(got: Tensor, due: Tensor, what: str) -> None:
    """Mismatch unless they are equal, NaN to NaN."""
    mine, theirs = got.cpu(), due.cpu()
    differ = (mine != theirs) & ~(mine.isnan() & theirs.isnan())
    if bool(differ.any()):
        at = tuple(differ.nonzero()[0].tolist())
        raise Mismatch(f"{what} at {list(at)} is {mine[at]}, not {theirs[at]}")


def verify(case: Case, device: str = "cpu", kernels: Any = int8_pages) -> None:
    """Mismatch if pages or results have other bits than the reference's, or are far from exact."""
    plain = inputs(case, device)
    given = plain.repaged(case.block_size, case.seed) if case.tree else plain
    key, value, slots = rows_of(case, given.pages)
    pages = garbage(case, given.pages.num_blocks, device)
    kernels.write_cache(key, value, *pages, slots)
    due = garbage(case, plain.pages.num_blocks, "cpu")
    in_order = [tensor.cpu() for tensor in rows_of(case, plain.pages)]
    int8_cache.write_cache(in_order[0], in_order[1], *due, in_order[2])
    if not case.tree:
        for name, mine, theirs in zip(NAMES, pages, due, strict=True):
            same_bits(mine, theirs, name)

    def run(given: Inputs, **options: Any) -> Tensor:
        found: Tensor = kernels.paged_attention(
            given.q, *pages, *given.tensors, case.scale, case.window,
            max_query_len=case.max_query_len, tails=given.tails, **options,
        )  # fmt: skip
        return found

    got = guarded_call(case, given, case.head_dim, run, UNTOUCHED)
    q, rows = given.q.cpu(), given.num_tokens
    where: Any = *(table.cpu() for table in plain.tensors), case.scale, case.window
    same_bits(got[:rows], int8_cache.paged_attention(q, *due, *where)[:rows], "attention")
    if case.bad:
        return
    verify_prologue(case, given.pages.num_blocks, slots, device, kernels)
    keys, values = (torch.zeros(due[0].shape, dtype=torch.float64) for _ in range(2))
    exact = [near(*int8_cache.quantize(each)) for each in in_order[:2]]
    reference.write_cache(exact[0], exact[1], keys, values, in_order[2])
    queries = near(*int8_cache.quantize_query(q))
    right = reference.paged_attention(queries, keys, values, *where)
    for row, part in enumerate(given.rows()):
        compare(got[part], right[part], f"attention of sequence {row}", ROUNDING)


def verify_prologue(case: Case, num_blocks: int, slots: Tensor, device: str, kernels: Any) -> None:
    """Mismatch if norm, rotation and writing in one launch are far from the reference's."""
    count, dim, interleaved = len(slots), case.head_dim, case.seed % 3 == 0
    rng, heads = generator(case.seed + 1), case.num_heads + 2 * case.num_kv_heads
    qkv = normal(rng, (count, heads, dim), case.dtype, device)
    norms: list[Any] = [None, None]
    if case.seed % 2:
        norms = [normal(rng, (dim,), case.dtype, device) for _ in norms]
    turns = torch.rand(count, dim // 2, generator=rng) * 2 * math.pi
    pages = garbage(case, num_blocks, device)
    angles = turns.cos().to(device), turns.sin().to(device)
    q = kernels.norm_rope_write(qkv, *norms, 1e-5, *angles, interleaved, *pages, slots)
    exact: list[Any] = [None if each is None else each.double().cpu() for each in (qkv, *norms)]
    caches = [torch.full(pages[0].shape, math.nan, dtype=torch.float64) for _ in range(2)]
    right = reference.norm_rope_write(
        exact[0], exact[1], exact[2], 1e-5, turns.cos(), turns.sin(), interleaved,
        caches[0], caches[1], slots.cpu(),
    )  # fmt: skip
    written = slots.cpu() >= 0
    compare(q.cpu()[written], right[written], "rotated queries", 0.02)
    table = torch.arange(num_blocks)
    for what, codes, scale, due in zip(("keys", "values"), pages[:2], pages[2:], caches,
                                       strict=True):  # fmt: skip
        due = due.transpose(0, 1).flatten(1, 2)  # [Hkv, S, D]
        got = [int8_cache.gather(each.cpu(), table, due.shape[1]) for each in (codes, scale)]
        numbers, there = (got[0] * got[1])[:, : due.shape[1]], ~due.isnan()
        if bool((numbers[~there] == numbers[~there]).any()):
            raise Mismatch(f"{what} were written to slots that are not in the batch")
        compare(numbers[there], due[there], what, 0.02)


# ---- compiled only ----------------------------------------------------------------------------


def _pages(num_kv_heads: int, head_dim: int, block_size: int) -> Codes:
    shape = (64, num_kv_heads, block_size, head_dim)
    scale = blank(*shape[:3], dtype=HALF)
    return blank(*shape, dtype=torch.uint8), blank(*shape, dtype=torch.int8), scale, scale


def _attend(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int = 16, query_len: int = 1,
    num_sequences: int = 8, tree: bool = False, **options: Any,
) -> None:  # fmt: skip
    lengths = blank(num_sequences, dtype=torch.int32)
    if tree:
        options["tails"] = lengths, blank(num_sequences, 16, dtype=torch.int32)
    int8_pages.paged_attention(
        blank(num_sequences * query_len, num_heads, head_dim),
        *_pages(num_kv_heads, head_dim, block_size), blank(num_sequences + 1, dtype=torch.int32),
        lengths, blank(num_sequences, 8192 // block_size, dtype=torch.int64), head_dim**-0.5,
        max_query_len=query_len, **options,
    )  # fmt: skip


def _write(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Callable[[], object]:
    key, pages = blank(64, num_kv_heads, head_dim, dtype=dtype), _pages(num_kv_heads, head_dim, 16)
    slots = blank(64, dtype=torch.int64)
    return partial(int8_pages.write_cache, key, key, *pages, slots)


def _prologue(
    num_heads: int, num_kv_heads: int, head_dim: int, normed: bool
) -> Callable[[], object]:
    qkv, angles = blank(64, num_heads + 2 * num_kv_heads, head_dim), blank(64, head_dim // 2)
    norm, angles = blank(head_dim) if normed else None, angles.float()
    pages, turn = _pages(num_kv_heads, head_dim, 16), (1e-5, angles, angles, False)
    slots = blank(64, dtype=torch.int64)
    return partial(int8_pages.norm_rope_write, qkv, norm, norm, *turn, *pages, slots)


def _launches() -> Iterator[Launch]:
    everywhere = (80, 90, 100)
    models = {"Llama-3.1-8B": (32, 8, 128), "Llama-3.2-1B": (32, 8, 64), "Gemma-2-2b": (8, 4, 256)}
    for model, sizes in models.items():
        for form, count in (("decode", 1), ("verify 5", 5), ("prefill", 2048)):
            many = 1 if count > 5 else 8
            call = partial(_attend, *sizes, query_len=count, num_sequences=many)
            yield Launch(f"{form}, {model}", call, everywhere)
    window = partial(_attend, 32, 32, 96, 64, window=4096)
    yield Launch("decode, Phi-3-mini, pages of 64, a window", window, everywhere)
    yield Launch("token trees", partial(_attend, 32, 8, 128, tree=True), everywhere)
    yield Launch("norm_rope_write, Llama-3.1-8B", _prologue(32, 8, 128, False))
    yield Launch("norm_rope_write, Qwen3-0.6B", _prologue(16, 8, 128, True))
    yield Launch("write, Llama-3.1-8B", _write(8, 128, BRAIN))
    yield Launch("write, head_dim 80 float32", _write(2, 80, torch.float32))


LAUNCHES = tuple(_launches())
