"""Benchmarks of MLA: decoding at 16 and at 128 heads, one long sequence, chunks, mixtures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache
from minillm_kernels.mla import mla_attention

NOPE_DIM, HEAD_VALUE_DIM = 128, 128  # of DeepSeek's explicit heads, which have Dr rotated ones too


@dataclass(frozen=True)
class Size:
    """One call: sequences as (query_len, seq_len), heads of a model on one GPU, what is wanted."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_heads: int = 16
    value_dim: int = 512
    rope_dim: int = 64
    block_size: int = 64
    bound: Literal["copy", "matmul", "latency"] = "copy"
    target: float | None = None
    batch_invariant: bool = False
    peers: tuple[str, ...] = ()
    peer_targets: Mapping[str, float] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """Numbers of a cached token."""
        return self.value_dim + self.rope_dim

    @property
    def num_rows(self) -> int:
        """Query tokens of all sequences."""
        return sum(query_len for query_len, _ in self.sequences)

    @property
    def num_positions(self) -> int:
        """Cached tokens of all sequences."""
        return sum(seq_len for _, seq_len in self.sequences)

    @property
    def num_bytes(self) -> int:
        """Every latent once; queries and results."""
        row = self.num_heads * (self.width + self.value_dim)
        return 2 * (self.num_positions * self.width + self.num_rows * row)

    @property
    def num_flops(self) -> int:
        """Two products with every position that a token sees: of the key, and of its latent."""
        pairs = sum(t * (s - t) + t * (t + 1) // 2 for t, s in self.sequences)
        return 2 * pairs * self.num_heads * (self.width + self.value_dim)


MANY = ((1, 8192),) * 64
MIXED = (*((1, 8192),) * 63, (2048, 2048))
DENSE = ("SDPA, gathered", "torch.bmm, gathered")
WIDE: Mapping[str, Any] = {"num_heads": 128, "bound": "matmul"}
SIZES = (
    # Bytes of a cached token: 1152 as a latent, 10240 as explicit keys and values of 16 heads.
    Size("decode 64 x 8k, 16 heads", MANY, target=0.85, peers=(*DENSE, "explicit heads")),
    Size("decode 64 x 8k, pages of 16", MANY, block_size=16, target=0.85),
    Size("decode 1 x 32k, 16 heads", ((1, 32768),), peers=DENSE),
    Size("decode 1 x 2k, 16 heads", ((1, 2048),), bound="latency"),
    Size("decode 64 x 8k, 32 heads", MANY, num_heads=32),
    Size("decode 64 x 8k, 128 heads", MANY, target=0.55, peers=DENSE, **WIDE),
    Size("decode 64 x 8k, 128 heads, pages of 16", MANY, block_size=16, target=0.55, **WIDE),
    Size("verify 5 of 64 x 8k, 16 heads", ((5, 8192),) * 64),
    Size("verify 5 of 1 x 32k, 16 heads", ((5, 32768),)),
    Size("verify 16 of 1 x 32k, 16 heads", ((16, 32768),), bound="matmul"),
    Size("verify 5 of 1 x 32k, batch-invariant", ((5, 32768),), batch_invariant=True,
         peers=("usual",)),
    Size("prefill 2k, 16 heads", ((2048, 2048),), bound="matmul"),
    Size("prefill 2k behind 14k, 128 heads", ((2048, 16384),), **WIDE),
    Size("2k prefill and 63 decodes of 8k", MIXED, bound="matmul"),
    Size("decode 64 x 8k, batch-invariant", MANY, batch_invariant=True, peers=("usual",),
         peer_targets={"usual": 1 / 1.12}),
    Size("decode 1 x 32k, batch-invariant", ((1, 32768),), batch_invariant=True, peers=("usual",),
         peer_targets={"usual": 1 / 1.12}),
    Size("prefill 2k, batch-invariant", ((2048, 2048),), bound="matmul", batch_invariant=True,
         peers=("usual",)),
)  # fmt: skip
TOY: Mapping[str, Any] = {"num_heads": 4, "value_dim": 32, "rope_dim": 16, "block_size": 16}
TINY = (
    Size("toy decode", ((1, 40),) * 2, target=0.85, peers=(*DENSE, "explicit heads"), **TOY),
    Size("toy verification", ((5, 40),) * 2, **TOY),
    Size("toy mixed", ((1, 40), (5, 20)), **TOY),
    Size("toy batch-invariant", ((1, 40),), batch_invariant=True, peers=("usual",), **TOY),
)  # fmt: skip


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    return [measurement(size, "cpu" if tiny else "cuda") for size in (TINY if tiny else SIZES)]


def measurement(size: Size, device: str) -> Measurement:
    """Its tensors are made at the first call, so that a list of measurements costs no memory."""
    count = 1 if device == "cpu" else sets_beyond_cache(size.num_bytes)
    sets = Sets(lambda number: batch(size, device), count)
    return Measurement(
        family="mla",
        name=size.name,
        run=sets.call(ours),
        num_bytes=size.num_bytes,
        num_flops=size.num_flops,
        bound=size.bound,
        peers={name: sets.call(PEERS[name]) for name in size.peers},
        num_sets=sets.count,
        target=size.target,
        peer_targets=size.peer_targets,
    )


@dataclass(frozen=True)
class Batch:
    """The tensors of one call."""

    size: Size
    q: Tensor
    latents: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor

    @cached_property
    def dense(self) -> Tensor:
        """The latents in order: what the others are given, copied outside of any timing."""
        longest = int(self.seq_lens.max())
        rows = self.latents[self.block_tables.long(), 0].flatten(1, 2)[:, :longest]
        return rows.contiguous()  # [B, S, R + Dr]

    @cached_property
    def explicit(self) -> list[Tensor]:
        """Queries, keys and values of explicit heads, of sequences of one length."""
        size, seq_len = self.size, self.size.sequences[0][1]
        shape, wide = (len(size.sequences), size.num_heads), NOPE_DIM + size.rope_dim
        parts = (1, wide), (seq_len, wide), (seq_len, HEAD_VALUE_DIM)
        return [normal((*shape, *part), str(self.q.device)) for part in parts]

    @property
    def scale(self) -> float:
        """Of the scores: by the dimension of an explicit head."""
        return (NOPE_DIM + self.size.rope_dim) ** -0.5


def batch(size: Size, device: str) -> Batch:
    """Random numbers in shuffled blocks; zeros would cost less power and look faster."""
    needed = [-(-seq_len // size.block_size) for _, seq_len in size.sequences]
    blocks = torch.randperm(sum(needed), dtype=torch.int32)
    tables = torch.zeros(len(needed), max(needed), dtype=torch.int32)
    for table, part in zip(tables, blocks.split(needed), strict=True):
        table[: len(part)] = part
    starts = torch.tensor([0, *(query_len for query_len, _ in size.sequences)]).cumsum(0)
    return Batch(
        size,
        normal((size.num_rows, size.num_heads, size.width), device),
        normal((sum(needed), 1, size.block_size, size.width), device),
        starts.to(torch.int32).to(device),
        torch.tensor([seq_len for _, seq_len in size.sequences], dtype=torch.int32, device=device),
        tables.to(device),
    )


def normal(shape: tuple[int, ...], device: str) -> Tensor:
    """Normal numbers in bf16."""
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()


# ---- ours ------------------------------------------------------------------------------------


def ours(given: Batch, batch_invariant: bool | None = None) -> Tensor:
    """The kernels of this family."""
    size = given.size
    return mla_attention(
        given.q,
        given.latents,
        size.value_dim,
        given.query_start,
        given.seq_lens,
        given.block_tables,
        given.scale,
        max_query_len=max(query_len for query_len, _ in size.sequences),
        batch_invariant=size.batch_invariant if batch_invariant is None else batch_invariant,
    )


# ---- the others: decoding sequences of one length, over latents that are gathered already ------


def gathered(given: Batch) -> tuple[Tensor, Tensor]:
    """Queries [B, H, R + Dr] and latents [B, S, R + Dr]."""
    size, seq_len = given.size, given.size.sequences[0][1]
    if set(size.sequences) != {(1, seq_len)}:
        raise ValueError("this peer decodes sequences of one length only.")
    return given.q, given.dense


def sdpa(given: Batch) -> Tensor:
    """MQA by torch: the heads of a token stand where query positions do, so no mask is needed."""
    q, k = gathered(given)
    q, k = q.unsqueeze(1), k.unsqueeze(1)
    value = k[..., : given.size.value_dim]
    return F.scaled_dot_product_attention(q, k, value, scale=given.scale).squeeze(1)


def bmm(given: Batch) -> Tensor:
    """Two batched products, with the scores written out between them."""
    q, k = gathered(given)
    weights = torch.bmm(q, k.transpose(1, 2)).float().mul_(given.scale).softmax(-1)
    return torch.bmm(weights.to(k.dtype), k[..., : given.size.value_dim])


def explicit(given: Batch) -> Tensor:
    """The same model with explicit keys and values, as MHA: what the latents save reading."""
    q, k, v = given.explicit
    return F.scaled_dot_product_attention(q, k, v)


PEERS: Mapping[str, Callable[[Batch], object]] = {
    "SDPA, gathered": sdpa,
    "torch.bmm, gathered": bmm,
    "explicit heads": explicit,
    "usual": partial(ours, batch_invariant=False),
}
