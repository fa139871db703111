"""Attention over pages: a cache in which everything that must not be read is poison, and the checks
that `paged_attention` and `mla` share."""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from minillm_kernels.check.case import Mismatch, compare, generator, guarded, normal
from minillm_kernels.paged_config import FEW

BRANCHES = 12  # slots of a token tree beside a path
SPARE = 3  # blocks that belong to no sequence
Tails = tuple[Tensor, Tensor]  # of launch.py
UNTOUCHED = 7.0  # marks output rows that must stay unwritten; a NaN could come from the query


@dataclass(frozen=True)
class Paged:
    """Caches of one layer and the tables that lead through them.

    `caches` are [blocks, Hkv, block_size, D] each. Positions behind a sequence's end and blocks
    that no table names are NaN; entries behind a table's end name a block that does not exist.
    """

    caches: tuple[Tensor, ...]
    block_tables: Tensor
    seq_lens: Tensor

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache."""
        return len(self.caches[0])


def paged(
    rng: torch.Generator,
    seq_lens: Sequence[int],
    block_size: int,
    num_kv_heads: int,
    head_dims: Sequence[int],
    dtype: torch.dtype,
    device: str,
    scale: float = 1.0,
    extra_columns: int = 2,
) -> Paged:
    """One cache per entry of `head_dims`, the blocks of the sequences shuffled."""
    needed = [-(-length // block_size) for length in seq_lens]
    num_blocks = sum(needed) + SPARE
    order = torch.randperm(num_blocks, generator=rng)
    tables = torch.full((len(seq_lens), max([1, *needed]) + extra_columns), num_blocks + 7)
    caches = [
        torch.full((num_blocks, num_kv_heads, block_size, dim), math.nan, dtype=dtype)
        for dim in head_dims
    ]
    start = 0
    for row, (length, count) in enumerate(zip(seq_lens, needed, strict=True)):
        blocks = order[start : start + count]
        start += count
        tables[row, :count] = blocks
        for cache, dim in zip(caches, head_dims, strict=True):
            rows = torch.full((num_kv_heads, count * block_size, dim), math.nan, dtype=dtype)
            rows[:, :length] = normal(rng, (num_kv_heads, length, dim), dtype, "cpu", scale)
            cache[blocks] = rows.unflatten(1, (count, block_size)).transpose(0, 1)
    return Paged(
        tuple(cache.to(device) for cache in caches),
        tables.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
    )


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory is filled with NaN, so that reading an unwritten workspace is noticed."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports a compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


# ---- calls ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call: `q` [N, H, D] of a flat batch, whose first `num_tokens` rows belong to
    sequences, bounded by `query_start` [B + 1]."""

    q: Tensor
    pages: Paged
    query_start: Tensor
    num_tokens: int
    tails: Tails | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """`query_start`, `seq_lens` and `block_tables`, as launchers take them."""
        return self.query_start, self.pages.seq_lens, self.pages.block_tables

    def rows(self) -> list[slice]:
        """The rows of each sequence."""
        return [slice(*pair) for pair in pairwise(self.query_start.tolist())]

    def alone(self, row: int) -> "Inputs":
        """One sequence without the others."""
        rows = self.rows()[row]
        pages = replace(
            self.pages,
            block_tables=self.pages.block_tables[row : row + 1],
            seq_lens=self.pages.seq_lens[row : row + 1],
        )
        start = self.query_start[row : row + 2] - rows.start
        return Inputs(self.q[rows], pages, start, rows.stop - rows.start)

    def recut(self, most: int) -> "Inputs":
        """The same tokens, at most `most` of a sequence at a time: chunks become sequences."""
        lens, seq_lens, owners = [], [], []
        for row, (rows, end) in enumerate(
            zip(self.rows(), self.pages.seq_lens.tolist(), strict=True)
        ):
            for left in range(rows.stop - rows.start, 0, -most):
                lens.append(min(left, most))
                seq_lens.append(end - left + lens[-1] if end else 0)
                owners.append(row)
        device = self.q.device
        pages = replace(
            self.pages,
            block_tables=self.pages.block_tables[owners],
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        )
        return replace(self, pages=pages, query_start=starts_of(lens, device))

    def repaged(self, block_size: int, seed: int | None = None) -> "Inputs":
        """The same positions in pages of another size, in another order; with a `seed`, the last
        ones of each sequence of one query are a path of a token tree, whose other slots are NaN."""
        caches, tables = self.pages.caches, self.pages.block_tables.cpu().long()
        lengths, (_, num_heads, old_size, _) = self.pages.seq_lens.tolist(), caches[0].shape
        dims, tails = [cache.shape[-1] for cache in caches], None
        room = lengths if seed is None else [length + BRANCHES for length in lengths]
        new = paged(generator(1), room, block_size, num_heads, dims, caches[0].dtype, "cpu")
        for cache in new.caches:
            cache.fill_(math.nan)
        if seed is not None:
            counts = [rows.stop - rows.start for rows in self.rows()]
            tails = random_tails(generator(seed), lengths, counts)
            new = replace(new, seq_lens=self.pages.seq_lens.cpu())
        for row, length in enumerate(lengths):
            at = torch.arange(length)
            place = at if tails is None else places_of(at, tails, row)
            blocks = new.block_tables[row, place // block_size].long()
            for cache, old in zip(new.caches, caches, strict=True):
                source = old.cpu()[tables[row, at // old_size], :, at % old_size]
                cache[blocks, :, place % block_size] = source
        device = self.q.device
        moved = tuple(cache.to(device) for cache in new.caches)
        tables = new.block_tables.to(self.pages.block_tables)  # its dtype, too
        pages = Paged(moved, tables, new.seq_lens.to(device))
        if tails is not None:
            tails = tails[0].to(device), tails[1].to(device)
        return replace(self, pages=pages, tails=tails)


def random_tails(rng: torch.Generator, lengths: Sequence[int], query_lens: Sequence[int]) -> Tails:
    """Of each sequence of one query up to 64 last positions, on a path whose slots ascend."""
    starts, order = list(lengths), torch.zeros(len(lengths), 64, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, query_lens, strict=True)):
        if count == 1 and length:
            tail = int(torch.randint(1, min(length, 64) + 1, (), generator=rng))
            chosen = torch.randperm(tail + BRANCHES, generator=rng)[:tail]
            starts[row], order[row, :tail] = length - tail, chosen.sort().values.int()
    return torch.tensor(starts, dtype=torch.int32), order


def places_of(at: Tensor, tails: Tails, row: int) -> Tensor:
    """Where positions of a sequence are among the slots of its blocks."""
    start, order = int(tails[0][row]), tails[1][row].long()
    return torch.where(at < start, at, start + order[(at - start).clamp(0, len(order) - 1)])


def starts_of(lens: Sequence[int], device: torch.device | str) -> Tensor:
    """The bounds of sequences of these lengths, int32 [B + 1]."""
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32).to(device)


def inputs_of(
    case: Any, num_kv_heads: int, head_dims: Sequence[int], head_dim: int, device: str
) -> Inputs:
    """Queries, caches full of poison around what may be read, and where sequences begin."""
    rng = generator(case.seed)
    query_lens = [query_len for query_len, _ in case.sequences]
    seq_lens = [seq_len for _, seq_len in case.sequences]
    pages = paged(rng, seq_lens, case.block_size, num_kv_heads, head_dims, case.dtype, device)
    num_tokens = sum(query_lens)
    q = normal(rng, (num_tokens + case.padding, case.num_heads, head_dim), case.dtype, device)
    q[num_tokens:] = math.nan
    tables = pages.block_tables.to(torch.int32 if case.seed % 2 else torch.int64)
    pages = replace(pages, block_tables=tables)
    return Inputs(q, pages, starts_of(query_lens, device), num_tokens)


def random_sequences(rng: random.Random, block_size: int, long: int) -> Mapping[str, Any]:
    """Up to four sequences of any mix of lengths, on the edge of a block too, with up to `long`
    queries; and perhaps an upper bound of these, as a graph's, which may be more."""
    edges = (max(block_size - 1, 1), block_size, block_size + 1)
    sequences = []
    for _ in range(rng.randint(1, 4)):
        seq_len = rng.choice((0, 1, *edges, rng.randint(2, 40), rng.randint(41, 200)))
        most = min(seq_len, rng.choice((FEW, long))) if seq_len else 3
        sequences.append((rng.choice((1, 1, rng.randint(0, most))), seq_len))
    longest = max(query_len for query_len, _ in sequences)
    room = rng.choice((max(longest, 1), FEW))
    told = longest <= room and rng.random() < 0.7
    return {"sequences": tuple(sequences), "max_query_len": room if told else None}


Run = Callable[..., Tensor]


def guarded_call(case: Any, given: Inputs, value_dim: int, run: Run, padding: float) -> Tensor:
    """What `run` computes; Mismatch if it writes beside its output, or leaves something else than
    `padding` in the rows behind the last sequence."""
    device = str(given.q.device)
    out = guarded((len(given.q), case.num_heads, value_dim), case.dtype, device)
    out.view[given.num_tokens :].fill_(UNTOUCHED)
    with poisoned_memory():
        got = run(given, out=out.view)
    out.check(written=False)
    if got is not out.view:
        raise Mismatch("the result is not in out")
    if bool((got[given.num_tokens :] != padding).any()):
        raise Mismatch(f"rows behind the last sequence are not {padding}")
    return got


def verify_rows(
    case: Any, given: Inputs, value_dim: int, run: Run, expected: Tensor, padding: float
) -> None:
    """Mismatch if `run` computes something else than `expected`, each sequence by its own scale, or
    fails `guarded_call`."""
    got = guarded_call(case, given, value_dim, run, padding)
    for rows, (query_len, seq_len) in zip(given.rows(), case.sequences, strict=True):
        compare(got[rows], expected[rows], f"attention of {query_len} rows, length {seq_len},")


def verify_bits(
    given: Inputs, run: Run, counts: Sequence[int], ways: Mapping[str, Mapping[str, Any]]
) -> None:
    """Mismatch if the bits of a token depend on what it is computed with (batch-invariant mode).

    Its sequence comes whole, in chunks of each of `counts`, in several `ways` (options of `run`) if
    these are few, alone, and in other pages.
    """
    whole = run(given)

    def same(got: Tensor, due: Tensor, what: str) -> None:
        differ = (got != due).flatten(1).any(1)
        if bool(differ.any()):
            tokens = differ.nonzero().flatten().tolist()
            raise Mismatch(f"{what}, tokens {tokens} have other bits than in the whole batch")

    for count in counts:
        cut = given.recut(count)
        same(run(cut), whole, f"{count} at a time")
        for way, options in ways.items():
            if count <= FEW:
                found = run(cut, max_query_len=count, **options)
                same(found, whole, f"{count} at a time, {way}")
    for block_size in (1, 7, 64):
        same(run(given.repaged(block_size)), whole, f"in pages of {block_size}")
    for row, rows in enumerate(given.rows()):
        same(run(given.alone(row)), whole[rows], f"alone, sequence {row}")
