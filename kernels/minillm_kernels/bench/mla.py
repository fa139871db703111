"""Benchmarks of MLA: decoding at 16 and at 128 heads, one long sequence, chunks, mixtures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minillm_kernels.bench.case import Measurement
from minillm_kernels.bench.paged_attention import Sequences, normal
from minillm_kernels.mla import mla_attention

NOPE_DIM, HEAD_VALUE_DIM = 128, 128  # of DeepSeek's explicit heads, which have Dr rotated ones too


@dataclass(frozen=True)
class Size(Sequences):
    """One call with the heads of a model on one GPU."""

    num_heads: int = 16
    value_dim: int = 512
    rope_dim: int = 64
    block_size: int = 64
    others: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of a cached token."""
        return self.value_dim + self.rope_dim

    @property
    def num_bytes(self) -> int:
        """Every latent once; queries and results."""
        row = self.num_heads * (self.width + self.value_dim)
        return 2 * (self.num_positions * self.width + self.num_rows * row)

    @property
    def num_flops(self) -> int:
        """Two products with every position that a token sees: of the key, and of its latent."""
        return 2 * self.num_pairs * self.num_heads * (self.width + self.value_dim)

    @property
    def scale(self) -> float:
        """Of the scores: by the dimension of an explicit head."""
        return (NOPE_DIM + self.rope_dim) ** -0.5

    def make(self, device: str, number: int) -> "Batch":
        """A batch."""
        count, tables = self.tables(self.block_size, device)
        q = normal(device, self.num_rows, self.num_heads, self.width)
        return Batch(self, q, normal(device, count, 1, self.block_size, self.width), tables)

    def run(self, inputs: "Batch") -> Tensor:
        """The kernels of this family."""
        return mla_attention(
            inputs.q, inputs.latents, self.value_dim, *inputs.tables, self.scale,
            max_query_len=self.longest, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """Those that are named in `others`."""
        return {name: PEERS[name] for name in self.others}


@dataclass(frozen=True)
class Batch:
    """The tensors of one call; `tables` are `query_start`, `seq_lens` and `block_tables`."""

    size: Size
    q: Tensor
    latents: Tensor
    tables: tuple[Tensor, Tensor, Tensor]

    @cached_property
    def dense(self) -> Tensor:
        """The latents in order: what the others are given, copied outside of any timing."""
        _, lengths, blocks = self.tables
        rows = self.latents[blocks.long(), 0].flatten(1, 2)[:, : int(lengths.max())]
        return rows.contiguous()  # [B, S, R + Dr]

    @cached_property
    def explicit(self) -> list[Tensor]:
        """Queries, keys and values of explicit heads, of sequences of one length."""
        size, seq_len = self.size, self.size.sequences[0][1]
        shape, wide = (len(size.sequences), size.num_heads), NOPE_DIM + size.rope_dim
        parts = (1, wide), (seq_len, wide), (seq_len, HEAD_VALUE_DIM)
        return [normal(str(self.q.device), *shape, *part) for part in parts]


def measurement(size: Size, device: str) -> Measurement:
    """Of one of `SIZES`, which a chapter measures."""
    return size.measurement("mla", device)


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
    return F.scaled_dot_product_attention(q, k, value, scale=given.size.scale).squeeze(1)


def bmm(given: Batch) -> Tensor:
    """Two batched products, with the scores written out between them."""
    q, k = gathered(given)
    weights = torch.bmm(q, k.transpose(1, 2)).float().mul_(given.size.scale).softmax(-1)
    return torch.bmm(weights.to(k.dtype), k[..., : given.size.value_dim])


def explicit(given: Batch) -> Tensor:
    """The same model with explicit keys and values, as MHA: what the latents save reading."""
    q, k, v = given.explicit
    return F.scaled_dot_product_attention(q, k, v)


PEERS: Mapping[str, Callable[[Batch], object]] = {
    "SDPA, gathered": sdpa,
    "torch.bmm, gathered": bmm,
    "explicit heads": explicit,
    "usual": lambda given: replace(given.size, batch_invariant=False).run(given),
}

MANY = ((1, 8192),) * 64
MIXED = (*((1, 8192),) * 63, (2048, 2048))
DENSE = ("SDPA, gathered", "torch.bmm, gathered")
WIDE: Mapping[str, Any] = {"num_heads": 128, "bound": "matmul"}
SIZES = (
    # Bytes of a cached token: 1152 as a latent, 10240 as explicit keys and values of 16 heads.
    Size("decode 64 x 8k, 16 heads", MANY, target=0.85, others=(*DENSE, "explicit heads")),
    Size("decode 64 x 8k, pages of 16", MANY, block_size=16, target=0.85),
    Size("decode 1 x 32k, 16 heads", ((1, 32768),), others=DENSE),
    Size("decode 1 x 2k, 16 heads", ((1, 2048),), bound="latency"),
    Size("decode 64 x 8k, 32 heads", MANY, num_heads=32),
    Size("decode 64 x 8k, 128 heads", MANY, target=0.55, others=DENSE, **WIDE),
    Size("decode 64 x 8k, 128 heads, pages of 16", MANY, block_size=16, target=0.55, **WIDE),
    Size("verify 5 of 64 x 8k, 16 heads", ((5, 8192),) * 64),
    Size("verify 5 of 1 x 32k, 16 heads", ((5, 32768),)),
    Size("verify 16 of 1 x 32k, 16 heads", ((16, 32768),), bound="matmul"),
    Size("verify 5 of 1 x 32k, batch-invariant", ((5, 32768),), batch_invariant=True,
         others=("usual",)),
    Size("prefill 2k, 16 heads", ((2048, 2048),), bound="matmul"),
    Size("prefill 2k behind 14k, 128 heads", ((2048, 16384),), **WIDE),
    Size("2k prefill and 63 decodes of 8k", MIXED, bound="matmul"),
    Size("decode 64 x 8k, batch-invariant", MANY, batch_invariant=True, others=("usual",),
         peer_targets={"usual": 1 / 1.12}),
    Size("decode 1 x 32k, batch-invariant", ((1, 32768),), batch_invariant=True, others=("usual",),
         peer_targets={"usual": 1 / 1.12}),
    Size("prefill 2k, batch-invariant", ((2048, 2048),), bound="matmul", batch_invariant=True,
         others=("usual",)),
)  # fmt: skip
TOY: Mapping[str, Any] = {"num_heads": 4, "value_dim": 32, "rope_dim": 16, "block_size": 16}
TINY = (
    Size("toy decode", ((1, 40),) * 2, target=0.85, others=(*DENSE, "explicit heads"), **TOY),
    Size("toy verification", ((5, 40),) * 2, **TOY),
    Size("toy mixed", ((1, 40), (5, 20)), **TOY),
    Size("toy batch-invariant", ((1, 40),), batch_invariant=True, others=("usual",), **TOY),
)  # fmt: skip
