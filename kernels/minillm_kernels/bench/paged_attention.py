"""Benchmarks of paged attention: decoding batches, one long row, chunks of prompts, mixtures."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache
from minillm_kernels.launch import arch
from minillm_kernels.paged_attention import paged_attention
from minillm_kernels.paged_config import Config, Tiles, choose


@dataclass(frozen=True)
class Size:
    """One call: sequences as (query_len, seq_len), the heads of a model, what is wanted.

    `tiles` changes the decode kernel's, to compare its forms; `mixed` adds the two kernels that a
    mixed batch could be cut into as a peer, `usual` the mode that is not batch-invariant.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    bound: str = "copy"
    target: float | None = None
    batch_invariant: bool = False
    tiles: Mapping[str, Any] = field(default_factory=dict)
    peers: tuple[str, ...] = ("SDPA", "varlen_attn")
    peer_targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Query rows of all sequences."""
        return sum(query_len for query_len, _ in self.sequences)

    @property
    def longest(self) -> int:
        """Most query rows of a sequence."""
        return max(query_len for query_len, _ in self.sequences)

    @property
    def num_bytes(self) -> int:
        """Keys and values once; queries and results."""
        positions = sum(seq_len for _, seq_len in self.sequences)
        numbers = positions * self.num_kv_heads + self.num_rows * self.num_heads
        return 2 * 2 * self.head_dim * numbers

    @property
    def num_flops(self) -> int:
        """Two products with every position that a row sees."""
        pairs = sum(t * (s - t) + t * (t + 1) // 2 for t, s in self.sequences)
        return 4 * pairs * self.num_heads * self.head_dim


MANY, LONG, SHORT = ((1, 4096),) * 64, ((1, 32768),), ((1, 2048),)
MIXED = (*((1, 4096),) * 63, (2048, 2048))
FAST: Mapping[str, float] = {"usual": 1 / 1.12}
SIZES = (
    Size("decode 64 x 4k, pages of 16", MANY, target=0.93),
    Size("decode 64 x 4k, pages of 64", MANY, block_size=64, target=0.93),
    Size("decode 64 x 4k, heads as rows", MANY, block_size=64, tiles={"swap": False}, peers=()),
    Size("decode 64 x 4k, 8 columns", MANY, block_size=64, tiles={"least_heads": 8}, peers=()),
    Size("decode 64 x 4k, 2 stages", MANY, block_size=64, tiles={"num_stages": 2}, peers=()),
    Size("decode 64 x 4k, pointers", MANY, block_size=64, tiles={"bulk": False}, peers=()),
    Size("decode 1 x 32k, pages of 16", LONG, target=0.78),
    Size("decode 1 x 32k, pages of 64", LONG, block_size=64, target=0.78),
    Size("decode 1 x 2k, pages of 64", SHORT, block_size=64, bound="latency", target=6.0),
    Size("verify 5 of 1 x 32k", ((5, 32768),), block_size=64, target=0.75, peers=("SDPA",)),
    Size("verify 5 of 64 x 4k", ((5, 4096),) * 64, block_size=64, target=0.9, peers=("SDPA",)),
    Size("verify 16 of 1 x 32k", ((16, 32768),), block_size=64, target=0.7, peers=("SDPA",)),
    Size("verify 5 of 1 x 32k, batch-invariant", ((5, 32768),), block_size=64,
         batch_invariant=True, peers=("usual",), peer_targets=FAST),
    Size("decode 64 x 4k, Qwen3-0.6B", MANY, num_heads=16, block_size=64, target=0.93),
    Size("prefill 1 x 2k", ((2048, 2048),), block_size=64, bound="matmul"),
    Size("prefill 2k behind 14k", ((2048, 16384),), block_size=64, bound="matmul"),
    Size("prefill 2k behind 14k, pages of 16", ((2048, 16384),), bound="matmul"),
    Size(
        "2k prefill and 63 decodes of 4k", MIXED, block_size=64, peers=("apart",),
        peer_targets={"apart": 1 / 1.1},
    ),
    Size("decode 64 x 4k, batch-invariant", MANY, block_size=64, batch_invariant=True,
         peers=("usual",), peer_targets=FAST),
    Size("decode 1 x 32k, batch-invariant", LONG, block_size=64, batch_invariant=True,
         peers=("usual",), peer_targets=FAST),
    Size("prefill 2k behind 14k, batch-invariant", ((2048, 16384),), block_size=64,
         bound="matmul", batch_invariant=True, peers=("usual",), peer_targets=FAST),
)  # fmt: skip
TOY: Mapping[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
TINY = (
    Size("toy decode", ((1, 40), (1, 9)), **TOY, target=0.93, peers=("SDPA",)),
    Size("toy decode, heads as rows", ((1, 40),), **TOY, tiles={"swap": False}, peers=()),
    Size("toy verification", ((5, 40), (5, 20)), **TOY, peers=("SDPA",)),
    Size("toy mixed", ((1, 40), (5, 20)), **TOY, peers=("apart", "SDPA")),
    Size("toy batch-invariant", ((1, 40),), **TOY, batch_invariant=True, peers=("usual",)),
)


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    return [measurement(size, "cpu" if tiny else "cuda") for size in (TINY if tiny else SIZES)]


def measurement(size: Size, device: str) -> Measurement:
    """Tensors are made at the first call, so that a list of measurements costs no memory."""
    sets = sets_of(size, device)
    return Measurement(
        family="paged_attention",
        name=size.name,
        run=sets.call(ours),
        num_bytes=size.num_bytes,
        num_flops=size.num_flops,
        bound=size.bound,  # type: ignore[arg-type]
        peers={name: sets.call(PEERS[name]) for name in size.peers},
        num_sets=sets.count,
        target=size.target,
        peer_targets=size.peer_targets,
    )


@dataclass(frozen=True)
class Batch:
    """The tensors of one call; `parts` are those of the sequences with one row, and the others."""

    size: Size
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.size.head_dim**-0.5


def sets_of(size: Size, device: str) -> Sets:
    """As many batches as it takes to leave the GPU's cache."""
    count = 1 if device == "cpu" else sets_beyond_cache(size.num_bytes)
    return Sets(lambda number: batch(size, device), count)


def batch(size: Size, device: str) -> Batch:
    """Random numbers in shuffled blocks; zeros would cost less power and look faster."""
    needed = [-(-seq_len // size.block_size) for _, seq_len in size.sequences]
    blocks = torch.randperm(sum(needed), dtype=torch.int32)
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for table, part in zip(tables, blocks.split(needed), strict=True):
        table[: len(part)] = part
    shape = (sum(needed), size.num_kv_heads, size.block_size, size.head_dim)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()

    starts = torch.tensor([0, *(query_len for query_len, _ in size.sequences)]).cumsum(0)
    return Batch(
        size,
        draw(size.num_rows, size.num_heads, size.head_dim),
        draw(*shape),
        draw(*shape),
        starts.to(torch.int32).to(device),
        torch.tensor([s for _, s in size.sequences], dtype=torch.int32, device=device),
        tables.to(device),
    )


# ---- ours -------------------------------------------------------------------------------------


def configured(size: Size) -> Config | None:
    """The usual configuration with the measurement's own decode tiles."""
    if not size.tiles:
        return None
    config = choose(arch(), torch.bfloat16, size.head_dim)
    decode: Tiles = replace(config.decode, **size.tiles)
    return replace(config, decode=decode)


def ours(given: Batch, batch_invariant: bool | None = None, rows: slice | None = None) -> Tensor:
    """One call, or one of the sequences in `rows` alone, whose query rows are the first or last."""
    size = given.size
    rows = slice(0, len(size.sequences)) if rows is None else rows
    chosen: Sequence[tuple[int, int]] = size.sequences[rows]
    before = sum(query_len for query_len, _ in size.sequences[: rows.start])
    count = sum(query_len for query_len, _ in chosen)
    query_start = given.query_start[rows.start : rows.stop + 1]
    if before:  # the last sequence alone
        query_start = given.query_start[rows.start : rows.stop + 1] - before
    return paged_attention(
        given.q[before : before + count],
        given.k_cache,
        given.v_cache,
        query_start,
        given.seq_lens[rows],
        given.block_tables[rows],
        given.scale,
        max_query_len=max(query_len for query_len, _ in chosen),
        batch_invariant=size.batch_invariant if batch_invariant is None else batch_invariant,
        config=configured(size),
    )


def apart(given: Batch) -> tuple[Tensor, Tensor]:
    """The decode rows (which come first) and the chunk behind them by two calls."""
    last = len(given.size.sequences) - 1
    return ours(given, rows=slice(0, last)), ours(given, rows=slice(last, last + 1))


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
        q, k, v, mask, is_causal=query_len == seq_len, scale=given.scale, enable_gqa=True
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
    starts = F.pad(given.seq_lens.cumsum(0), (1, 0)).to(torch.int32)
    more: Any = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return varlen_attn(
        given.q, k.view(shape), v.view(shape), given.query_start, starts, size.longest,
        max(lengths), scale=given.scale, window_size=(-1, 0), **more,
    )  # fmt: skip


PEERS: Mapping[str, Callable[[Batch], object]] = {
    "SDPA": sdpa,
    "varlen_attn": varlen,
    "apart": apart,
    "usual": partial(ours, batch_invariant=False),
}
