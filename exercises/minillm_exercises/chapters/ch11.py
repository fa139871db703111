"""Chapter 11: a paged cache, what reading it has to cost, and the programs that a GPU holds.

`batch` makes a decode step whose unused memory is poison, and `pages_in_a_row` is how one judges a
grid of programs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import reference
from minillm_kernels.check.pages import paged
from minillm_kernels.launch import INTERPRETED

DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
PROCESSORS = 132  # streaming multiprocessors of an H100 SXM and an H200 (NVIDIA, 2023 and 2024)


# ---- a decode step ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """One query for each of some sequences, whose keys and values lie in pages.

    `q` [B, H, D], `k` and `v` [pages, Hkv, page, D], `tables` [B, M], `lengths` [B]. Slots behind
    a sequence's end and pages of nobody are NaN; entries behind a table's end name no page.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    tables: Tensor
    lengths: Tensor

    @property
    def texts(self) -> int:
        """Sequences."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        """Heads of the cache."""
        return self.k.shape[1]

    @property
    def dim(self) -> int:
        """Numbers of a head."""
        return self.q.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def places(self) -> tuple[Any, ...]:
        """What a kernel needs to find its page: tables, lengths, scale, columns of a table, Hkv."""
        return self.tables, self.lengths, self.scale, self.tables.shape[1], self.kv_heads

    @property
    def sizes(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {"GROUP": self.group, "PAGE": self.k.shape[2], "D": self.dim}

    @property
    def starts(self) -> Tensor:
        """Where each sequence's query rows begin, which the engine wants to know: 0, 1 ... B."""
        return torch.arange(len(self.q) + 1, dtype=torch.int32, device=self.q.device)

    @property
    def scale(self) -> float:
        """Of the scores: 1 / sqrt(D)."""
        return float(self.dim**-0.5)

    @property
    def cache_bytes(self) -> int:
        """Keys and values that belong to a sequence, each once."""
        numbers = int(self.lengths.sum()) * self.kv_heads * self.dim
        return 2 * numbers * self.k.element_size()

    def oracle(self) -> Tensor:
        """The right result, in float64."""
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        return reference.paged_attention(
            q, k, v, self.starts, self.lengths, self.tables, self.scale
        )


def batch(
    lengths: Sequence[int],
    heads: int = 8,
    kv_heads: int = 2,
    dim: int = 32,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Batch:
    """A decode step of sequences of these lengths: always the same numbers."""
    rng = torch.Generator().manual_seed(11)
    q = torch.randn(len(lengths), heads, dim, generator=rng).to(dtype).to(DEVICE)
    cache = paged(rng, lengths, page, kv_heads, (dim, dim), dtype, DEVICE)
    keys, values = cache.caches
    return Batch(q, keys, values, cache.block_tables, cache.seq_lens)


def close(result: Tensor, oracle: Tensor) -> bool:
    """Equal but for the rounding of float32. NaN is equal to nothing."""
    return bool(((result.double() - oracle).abs() <= 1e-4).all())


# ---- programs and processors -----------------------------------------------------------------


def pages_in_a_row(pages: int, rows: int, splits: int, places: int = PROCESSORS) -> int:
    """Pages that a place reads one after the other until a grid of `rows` times `splits` programs
    is done, which share `pages` pages per row: as many for each split, and the rest for the last.

    The model: all places read equally fast, each has one program at a time, and a free one takes
    the next, those of the first split first.
    """
    each = -(-pages // splits)
    until = [0] * places  # a heap
    for split in range(splits):
        part = max(0, min(each, pages - split * each))
        for _ in range(rows):
            heapreplace(until, until[0] + part)
    return max(until)
