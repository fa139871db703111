"""Cases of `minillm_kernels.int8_pages`: codes are written, then attended to, both with the bits of
`int8_cache`; and attention is near that of the rounded numbers, in float64."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import int8_cache, int8_pages, reference
from minillm_kernels.check.case import (
    Launch,
    Mismatch,
    blank,
    compare,
    generator,
    guarded,
    normal,
)
from minillm_kernels.check.pages import (
    BRANCHES,
    SPARE,
    UNTOUCHED,
    Tails,
    places_of,
    poisoned_memory,
    random_sequences,
    random_tails,
)
from minillm_kernels.check.pages import starts_of as bounds

HALF, BRAIN = torch.float16, torch.bfloat16
ROUNDING = 0.03  # of weights to 7 bits, as a share of the largest result
Codes = tuple[Tensor, Tensor, Tensor, Tensor]


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


@dataclass(frozen=True)
class Inputs:
    """Queries [N, H, D]; keys and values [S, Hkv, D] with their slots; and where sequences are."""

    q: Tensor
    key: Tensor
    value: Tensor
    slots: Tensor
    in_order: Tensor  # slots, if no sequence is a path of a tree
    tables: tuple[Tensor, Tensor, Tensor]
    tails: Tails | None
    num_blocks: int


def inputs(case: Case, device: str) -> Inputs:
    """Blocks are shuffled; entries behind a table's end name a block that does not exist. Keys and
    values are views of wider rows, and come in any order with rows that have no slot."""
    rng, size = generator(case.seed), case.block_size
    lengths = [length for _, length in case.sequences]
    counts = [count for count, _ in case.sequences]
    tails = random_tails(rng, lengths, counts) if case.tree else None
    room = BRANCHES if case.tree else 0
    needed = [-(-(length + room) // size) for length in lengths]
    num_blocks = sum(needed) + SPARE
    tables = torch.full((len(lengths), max([1, *needed]) + 2), num_blocks + 7)
    blocks = torch.randperm(num_blocks, generator=rng)
    slots: list[Tensor] = []
    in_order: list[Tensor] = []
    for row, (length, own) in enumerate(zip(lengths, blocks.split([*needed, SPARE]), strict=False)):
        tables[row, : len(own)] = own
        at = torch.arange(length)
        places = at if tails is None else places_of(at, tails, row)
        for found, each in ((slots, places), (in_order, at)):
            found.append(own[each // size] * size + each % size)
    slot, straight = (torch.cat([*each, torch.tensor([-1])]) for each in (slots, in_order))
    mixed = torch.randperm(len(slot), generator=rng)
    slot, straight = slot[mixed], straight[mixed]
    wide = normal(rng, (len(slot) + 1, 2 * case.num_kv_heads, case.head_dim), case.dtype, "cpu")
    wide *= 2.0 ** torch.randint(-3, 3, wide.shape[:2], generator=rng).to(wide.dtype)[..., None]
    wide[torch.rand(len(wide), generator=rng) < 0.1] = 0
    wide[-1] = math.nan  # behind the slots
    if case.bad:
        wide[0, 0, 3], wide[1, -1, 0] = math.nan, math.inf
    key, value = wide.to(device).chunk(2, 1)
    q = normal(rng, (sum(counts) + case.padding, case.num_heads, case.head_dim), case.dtype, device)
    if case.bad:
        q[-1, 0, 0] = -math.inf
    where = (
        bounds(counts, device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(torch.int32 if case.seed % 2 else torch.int64).to(device),
    )
    there = None if tails is None else (tails[0].to(device), tails[1].to(device))
    return Inputs(q, key, value, slot.to(device), straight, where, there, num_blocks)


def garbage(case: Case, num_blocks: int, device: str) -> Codes:
    """Pages that hold nothing yet: any codes, and scales that are NaN."""
    rng, shape = generator(1), (num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    codes = torch.randint(0, 256, shape, generator=rng)
    nan = torch.full(shape[:3], math.nan, dtype=HALF)
    pages = codes.byte(), codes.sub(128).to(torch.int8), nan, nan.clone()
    return tuple(each.to(device) for each in pages)  # type: ignore[return-value]


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
    given = inputs(case, device)
    pages, due = (garbage(case, given.num_blocks, place) for place in (device, "cpu"))
    kernels.write_cache(given.key, given.value, *pages, given.slots)
    key, value, slots = (x.cpu() for x in (given.key, given.value, given.in_order))
    int8_cache.write_cache(key, value, *due, slots)
    for name, mine, theirs in zip(("key", "value", "key_scale", "value_scale"), pages, due,
                                  strict=True):  # fmt: skip
        if not case.tree:
            same_bits(mine, theirs, name)
    out = guarded(given.q.shape, case.dtype, device)
    out.view[sum(count for count, _ in case.sequences) :].fill_(UNTOUCHED)
    with poisoned_memory():
        got = kernels.paged_attention(
            given.q, *pages, *given.tables, case.scale, case.window,
            max_query_len=case.max_query_len, tails=given.tails, out=out.view,
        )  # fmt: skip
    out.check(written=False)
    q, (starts, lengths, blocks) = given.q.cpu(), (table.cpu() for table in given.tables)
    tables = starts, lengths, blocks
    rows = int(starts[-1])
    wanted = int8_cache.paged_attention(q, *due, *tables, case.scale, case.window)
    same_bits(got[:rows], wanted[:rows], "attention")
    if bool((got[rows:] != UNTOUCHED).any()):
        raise Mismatch("rows behind the last sequence were written")
    if case.bad:
        return
    verify_prologue(case, given, device, kernels)
    key, value = (near(*int8_cache.quantize(x)) for x in (key, value))
    keys, values = (torch.zeros(due[0].shape, dtype=torch.float64) for _ in range(2))
    reference.write_cache(key, value, keys, values, slots)
    queries = near(*int8_cache.quantize_query(q))
    right = reference.paged_attention(queries, keys, values, *tables, case.scale, case.window)
    for row, (begin, end) in enumerate(pairwise(starts.tolist())):
        compare(got[begin:end], right[begin:end], f"attention of sequence {row}", ROUNDING)


def verify_prologue(case: Case, given: Inputs, device: str, kernels: Any) -> None:
    """Mismatch if norm, rotation and writing in one launch are far from the reference's."""
    count, dim, interleaved = len(given.slots), case.head_dim, case.seed % 3 == 0
    rng, heads = generator(case.seed + 1), case.num_heads + 2 * case.num_kv_heads
    qkv = normal(rng, (count, heads, dim), case.dtype, device)
    norms: list[Any] = [None, None]
    if case.seed % 2:
        norms = [normal(rng, (dim,), case.dtype, device) for _ in norms]
    turns = torch.rand(count, dim // 2, generator=rng) * 2 * math.pi
    pages = garbage(case, given.num_blocks, device)
    angles = turns.cos().to(device), turns.sin().to(device)
    q = kernels.norm_rope_write(qkv, *norms, 1e-5, *angles, interleaved, *pages, given.slots)
    exact: list[Any] = [None if each is None else each.double().cpu() for each in (qkv, *norms)]
    caches = [torch.full(pages[0].shape, math.nan, dtype=torch.float64) for _ in range(2)]
    right = reference.norm_rope_write(
        exact[0], exact[1], exact[2], 1e-5, turns.cos(), turns.sin(), interleaved,
        caches[0], caches[1], given.slots.cpu(),
    )  # fmt: skip
    written = given.slots.cpu() >= 0
    compare(q.cpu()[written], right[written], "rotated queries", 0.02)
    table = torch.arange(given.num_blocks)
    for what, codes, scale, due in zip(("keys", "values"), pages[:2], pages[2:], caches,
                                       strict=True):  # fmt: skip
        due = due.transpose(0, 1).flatten(1, 2)  # [Hkv, S, D]
        got = [int8_cache.gather(each.cpu(), table, due.shape[1]) for each in (codes, scale)]
        numbers, there = (got[0] * got[1])[:, : due.shape[1]], ~due.isnan()
        if bool((numbers[~there] == numbers[~there]).any()):
            raise Mismatch(f"{what} were written to slots that are not in the batch")
        compare(numbers[there], due[there], what, 0.02)


# ---- compiled only ----------------------------------------------------------------------------

SLOTS = blank(64, dtype=torch.int64)


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
    return partial(int8_pages.write_cache, key, key, *pages, SLOTS)


def _prologue(
    num_heads: int, num_kv_heads: int, head_dim: int, normed: bool
) -> Callable[[], object]:
    qkv, angles = blank(64, num_heads + 2 * num_kv_heads, head_dim), blank(64, head_dim // 2)
    norm, angles = blank(head_dim) if normed else None, angles.float()
    pages, turn = _pages(num_kv_heads, head_dim, 16), (1e-5, angles, angles, False)
    return partial(int8_pages.norm_rope_write, qkv, norm, norm, *turn, *pages, SLOTS)


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
