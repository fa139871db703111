"""Benchmarks of paged attention: decoding batches, one long row, chunks of prompts, mixtures."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.bench import case
from minillm_kernels.bench.case import Bound, Measurement
from minillm_kernels.launch import arch
from minillm_kernels.paged_attention import paged_attention
from minillm_kernels.paged_config import choose


@dataclass(frozen=True)
class Sequences(case.Size):
    """A call of attention: sequences as (query_len, seq_len)."""

    title: str
    sequences: tuple[tuple[int, int], ...]
    bound: Bound = "copy"
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        """What is computed."""
        return self.title

    @property
    def num_rows(self) -> int:
        """Query rows of all sequences."""
        return sum(query_len for query_len, _ in self.sequences)

    @property
    def num_positions(self) -> int:
        """Cached positions of all sequences."""
        return sum(seq_len for _, seq_len in self.sequences)

    @property
    def longest(self) -> int:
        """Most query rows of a sequence."""
        return max(query_len for query_len, _ in self.sequences)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query row and a position that it sees."""
        return sum(t * (s - t) + t * (t + 1) // 2 for t, s in self.sequences)

    def tables(self, block_size: int, device: str) -> tuple[int, tuple[Tensor, Tensor, Tensor]]:
        """The number of blocks; `query_start`, `seq_lens` and tables of shuffled blocks."""
        needed = [-(-seq_len // block_size) for _, seq_len in self.sequences]
        blocks = torch.randperm(sum(needed), dtype=torch.int32)
        tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
        for table, part in zip(tables, blocks.split(needed), strict=True):
            table[: len(part)] = part
        lengths = torch.tensor([seq_len for _, seq_len in self.sequences], dtype=torch.int32)
        starts = torch.tensor([0, *(query_len for query_len, _ in self.sequences)]).cumsum(0)
        return sum(needed), (starts.to(device, torch.int32), lengths.to(device), tables.to(device))


def normal(device: str, *shape: int) -> Tensor:
    """Random numbers in bf16; zeros would cost less power and look faster."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


@dataclass(frozen=True)
class Batch:
    """The tensors of one call; `tables` are `query_start`, `seq_lens` and `block_tables`."""

    size: "Size"
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    tables: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Size(Sequences):
    """One call with the heads of a model; `tiles` changes the decode kernel's. Of the peers,
    "apart" are the two kernels that a mixed batch could be cut into, "usual" the mode that is not
    batch-invariant."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    tiles: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ("SDPA", "varlen_attn")

    @property
    def num_bytes(self) -> int:
        """Keys and values once; queries and results."""
        numbers = self.num_positions * self.num_kv_heads + self.num_rows * self.num_heads
        return 2 * 2 * self.head_dim * numbers

    @property
    def num_flops(self) -> int:
        """Two products with every position that a row sees."""
        return 4 * self.num_pairs * self.num_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.head_dim**-0.5

    def make(self, device: str, number: int) -> Any:
        """A batch."""
        count, tables = self.tables(self.block_size, device)
        shape = (count, self.num_kv_heads, self.block_size, self.head_dim)
        q = normal(device, self.num_rows, self.num_heads, self.head_dim)
        return Batch(self, q, normal(device, *shape), normal(device, *shape), tables)

    def run(self, inputs: Batch) -> Tensor:
        """One call of the kernels."""
        config = None
        if self.tiles:
            usual = choose(arch(), torch.bfloat16, self.head_dim)
            config = replace(usual, decode=replace(usual.decode, **self.tiles))
        return paged_attention(
            inputs.q, inputs.k_cache, inputs.v_cache, *inputs.tables, self.scale, config=config,
            max_query_len=self.longest, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """Those that are named in `others`."""
        return {name: PEERS[name] for name in self.others}


def apart(given: Batch) -> list[Tensor]:
    """The decode rows (which come first) and the chunk behind them by two calls."""
    size, (starts, lengths, blocks), found = given.size, given.tables, []
    last, first_row = len(size.sequences) - 1, 0
    for rows in (slice(0, last), slice(last, last + 1)):
        part = replace(size, sequences=size.sequences[rows])
        start = starts[rows.start : rows.stop + 1] - first_row
        q = given.q[first_row : first_row + part.num_rows]
        tables = start, lengths[rows], blocks[rows]
        found.append(part.run(replace(given, q=q, tables=tables)))
        first_row += part.num_rows
    return found


def measurement(size: Size, device: str) -> Measurement:
    """Of one of `SIZES`, which a chapter measures."""
    return size.measurement("paged_attention", device)


# ---- the others -------------------------------------------------------------------------------


def sdpa(given: Batch) -> Tensor:
    """torch's attention over the same keys, already gathered: it knows no pages.

    Only where all sequences are alike, since it knows no lengths either.
    """
    size = given.size
    query_len, seq_len = size.sequences[0]
    if len(set(size.sequences)) > 1:
        raise ValueError("SDPA needs sequences of one length.")
    k, v = gathered(given)
    q = given.q.view(len(size.sequences), query_len, *given.q.shape[1:]).transpose(1, 2)
    mask = None
    if 1 < query_len < seq_len:
        mask = torch.ones(query_len, seq_len, dtype=torch.bool, device=q.device)
        mask = mask.tril(seq_len - query_len)
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=query_len == seq_len, scale=size.scale, enable_gqa=True
    )
    return out.transpose(1, 2).flatten(0, 1)  # [N, H, D]


def gathered(given: Batch) -> tuple[Tensor, Tensor]:
    """The caches as if they had been contiguous: a view, with the same bytes to be read."""
    size, seq_len = given.size, given.size.sequences[0][1]
    shape = (len(size.sequences), size.num_kv_heads, -1, size.head_dim)
    count = math.prod(shape[:2]) * seq_len * size.head_dim
    k, v = (x.flatten()[:count].view(shape) for x in (given.k_cache, given.v_cache))
    return k, v


def varlen(given: Batch) -> object:
    """torch's FlashAttention over the same keys, already gathered, since torch 2.11's knows no
    pages. It takes fewer KV heads than query heads; from 2.13 on it must be told."""
    from torch.nn.attention.varlen import varlen_attn

    size = given.size
    lengths = [seq_len for _, seq_len in size.sequences]
    total = sum(lengths)
    k, v = (x.flatten()[: total * size.num_kv_heads * size.head_dim] for x in
            (given.k_cache, given.v_cache))  # fmt: skip
    shape = (total, size.num_kv_heads, size.head_dim)
    starts = F.pad(given.tables[1].cumsum(0), (1, 0)).to(torch.int32)
    more: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return varlen_attn(
        given.q, k.view(shape), v.view(shape), given.tables[0], starts, size.longest,
        max(lengths), scale=size.scale, window_size=(-1, 0), **more,
    )  # fmt: skip


PEERS: Mapping[str, Callable[[Batch], object]] = {
    "SDPA": sdpa,
    "varlen_attn": varlen,
    "apart": apart,
    "usual": lambda given: replace(given.size, batch_invariant=False).run(given),
}

MANY, LONG, SHORT = ((1, 4096),) * 64, ((1, 32768),), ((1, 2048),)
MIXED = (*((1, 4096),) * 63, (2048, 2048))
FAST: Mapping[str, float] = {"usual": 1 / 1.12}
SIZES = (
    Size("decode 64 x 4k, pages of 16", MANY, target=0.93),
    Size("decode 64 x 4k, pages of 64", MANY, block_size=64, target=0.93),
    Size("decode 64 x 4k, heads as rows", MANY, block_size=64, tiles={"swap": False}, others=()),
    Size("decode 1 x 32k, pages of 16", LONG, target=0.78),
    Size("decode 1 x 32k, pages of 64", LONG, block_size=64, target=0.78),
    Size("decode 1 x 2k, pages of 64", SHORT, block_size=64, bound="latency", target=6.0),
    Size("verify 5 of 1 x 32k", ((5, 32768),), block_size=64, target=0.75, others=("SDPA",)),
    Size("verify 5 of 64 x 4k", ((5, 4096),) * 64, block_size=64, target=0.9, others=("SDPA",)),
    Size("verify 16 of 1 x 32k", ((16, 32768),), block_size=64, target=0.7, others=("SDPA",)),
    Size("verify 5 of 1 x 32k, batch-invariant", ((5, 32768),), block_size=64,
         batch_invariant=True, others=("usual",), peer_targets=FAST),
    Size("decode 64 x 4k, Qwen3-0.6B", MANY, num_heads=16, block_size=64, target=0.93),
    Size("prefill 1 x 2k", ((2048, 2048),), block_size=64, bound="matmul"),
    Size("prefill 2k behind 14k", ((2048, 16384),), block_size=64, bound="matmul"),
    Size("prefill 2k behind 14k, pages of 16", ((2048, 16384),), bound="matmul"),
    Size(
        "2k prefill and 63 decodes of 4k", MIXED, block_size=64, others=("apart",),
        peer_targets={"apart": 1 / 1.1},
    ),
    Size("decode 64 x 4k, batch-invariant", MANY, block_size=64, batch_invariant=True,
         others=("usual",), peer_targets=FAST),
    Size("decode 1 x 32k, batch-invariant", LONG, block_size=64, batch_invariant=True,
         others=("usual",), peer_targets=FAST),
    Size("prefill 2k behind 14k, batch-invariant", ((2048, 16384),), block_size=64,
         bound="matmul", batch_invariant=True, others=("usual",), peer_targets=FAST),
)  # fmt: skip
TOY: Mapping[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY = (
    Size("toy decode", ((1, 40), (1, 9)), **TOY, target=0.93, others=("SDPA",)),
    Size("toy decode, heads as rows", ((1, 40),), **TOY, tiles={"swap": False}, others=()),
    Size("toy verification", ((5, 40), (5, 20)), **TOY, others=("SDPA",)),
    Size("toy mixed", ((1, 40), (5, 20)), **TOY, others=("apart", "SDPA")),
    Size("toy batch-invariant", ((1, 40),), **TOY, batch_invariant=True, others=("usual",)),
)
