"""Benchmarks of choosing tokens: one request's step, and a batch's with and without truncation.

Logits are as peaked as a language model's: normal numbers with a few tokens far above them. The
"flat" ones have more tokens within top-p than the search gathers, which is its worst case.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import sampling
from minillm_kernels.bench import case
from minillm_kernels.bench.case import Bound

FEW = 8  # rows whose logits are in the cache anyway, as their producer leaves them
LIKELY = 64  # tokens above the rest
TORCH, SORT = "torch", "torch sort"


@dataclass(frozen=True)
class Size(case.Size):
    """One operation on K rows."""

    op: str
    num_rows: int
    vocab_size: int = 151936
    dtype: torch.dtype = torch.float32
    flat: bool = False

    @property
    def name(self) -> str:
        """What is computed."""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.op} K={self.num_rows} V={self.vocab_size} {dtype}" + " flat" * self.flat

    @property
    def num_bytes(self) -> int:
        """Of logits, read once; and of the result, where it is as large."""
        written = 4 if self.op == "truncate" else 0
        return self.num_rows * self.vocab_size * (self.dtype.itemsize + written)

    @property
    def bound(self) -> Bound:
        """Memory; few rows are in the cache."""
        return "latency" if self.num_rows <= FEW else "copy"

    def make(self, device: str, number: int) -> tuple[Tensor, list[Tensor]]:
        """Logits [K, V], and of the rows temperature, top_k, top_p, min_p, seed, sample_index and
        position."""
        rng = torch.Generator(device).manual_seed(number)
        rows, size_of_row = shape = (self.num_rows, self.vocab_size)
        logits = torch.randn(shape, generator=rng, device=device) * 2
        if not self.flat:
            places = torch.randint(0, size_of_row, (rows, LIKELY), generator=rng, device=device)
            likely = torch.rand(places.shape, generator=rng, device=device) * 12 + 6
            logits.scatter_(1, places, likely)

        def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=device)

        stream = [torch.arange(rows, device=device) + start for start in (11, 0, 512)]
        top_k = full(0 if self.flat else 50, torch.int32)
        return logits.to(self.dtype), [full(0.8), top_k, full(0.9), full(0), *stream]

    def run(self, inputs: tuple[Tensor, list[Tensor]]) -> object:
        """The kernels."""
        logits, (temperature, top_k, top_p, min_p, *rest) = inputs
        stream: Any = rest  # of the noise
        if self.op == "gumbel_argmax":
            return sampling.gumbel_argmax(logits, temperature, min_p, *stream)
        if self.op == "truncate":
            return sampling.truncate(logits, top_k, top_p)
        return sampling.sample(logits, temperature, top_k, top_p, min_p, *stream)

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """The same in torch operations: what an engine without kernels does."""
        return {TORCH if self.op == "gumbel_argmax" else SORT: self.by_torch}

    def by_torch(self, inputs: tuple[Tensor, list[Tensor]]) -> object:
        """The fewest operations."""
        logits, (temperature, top_k, top_p, *_) = inputs
        if self.op == "truncate":
            return truncated_by_sort(logits.float(), top_k, top_p)
        scaled = logits.float() / temperature[:, None]
        return drawn(truncated_by_sort(scaled, top_k, top_p) if self.op == "sample" else scaled)


def drawn(logits: Tensor) -> Tensor:
    """A draw per row without a cumulative sum: the first of exponential clocks to ring."""
    shares = logits.softmax(dim=-1)
    return (shares / torch.empty_like(shares).exponential_()).argmax(dim=-1)


def truncated_by_sort(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Top-k and top-p of float32 [K, V] in the fewest torch operations, a sort being the first."""
    ordered, ids = logits.sort(dim=-1, descending=True)
    kth = ordered.gather(1, (top_k.long() - 1).clamp(min=0)[:, None])
    ordered = ordered.masked_fill((ordered < kth) & (top_k[:, None] > 0), float("-inf"))
    shares = ordered.softmax(dim=-1)
    behind = shares.cumsum(dim=-1) - shares >= top_p[:, None]
    return logits.scatter(1, ids, ordered.masked_fill(behind, float("-inf")))


BF16 = torch.bfloat16
SIZES = (
    Size("gumbel_argmax", 1, target=5.0),
    Size("sample", 1),
    Size("truncate", 1),
    Size("gumbel_argmax", 64),
    Size("gumbel_argmax", 256, 128256, BF16),
    Size("truncate", 64, peer_targets={SORT: 10.0}),
    Size("truncate", 64, 128256, BF16, peer_targets={SORT: 10.0}),
    Size("truncate", 64, flat=True),
    Size("sample", 64, peer_targets={SORT: 10.0}),
    Size("sample", 256, 128256, BF16),
)
TINY = tuple(
    Size(op, 2, 300, dtype, flat=op == "truncate")
    for op, dtype in (
        ("gumbel_argmax", torch.float32),
        ("truncate", torch.float32),
        ("sample", BF16),
    )
)
