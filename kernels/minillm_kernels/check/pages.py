"""A paged cache in which everything that must not be read is poison."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm_kernels.check.case import normal

SPARE = 3  # blocks that belong to no sequence


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
