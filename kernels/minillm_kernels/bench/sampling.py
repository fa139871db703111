"""Benchmarks of choosing tokens: one request's step, and a batch's with and without truncation.

Logits are as peaked as a language model's: normal numbers with a few tokens far above them. The
"flat" ones have more tokens within top-p than the search gathers, which is its worst case.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minillm_kernels import sampling
from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache

FEW = 8  # rows whose logits are in the cache anyway, as their producer leaves them
LIKELY = 64  # tokens above the rest


@dataclass(frozen=True)
class Size:
    """One operation on K rows, with the microseconds (or the peer's ratio) that are wanted."""

    op: str
    num_rows: int
    vocab_size: int = 151936
    dtype: torch.dtype = torch.float32
    flat: bool = False
    target: float | None = None
    sort_target: float | None = None

    @property
    def num_bytes(self) -> int:
        """Of logits, read once; and of the result, where it is as large."""
        written = 4 if self.op == "truncate" else 0
        return self.num_rows * self.vocab_size * (self.dtype.itemsize + written)


BF16 = torch.bfloat16
SIZES = (
    Size("gumbel_argmax", 1, target=5.0),
    Size("sample", 1),
    Size("truncate", 1),
    Size("gumbel_argmax", 64),
    Size("gumbel_argmax", 256, 128256, BF16),
    Size("truncate", 64, sort_target=10.0),
    Size("truncate", 64, 128256, BF16, sort_target=10.0),
    Size("truncate", 64, flat=True),
    Size("sample", 64, sort_target=10.0),
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


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    return [measurement(size, "cpu" if tiny else "cuda") for size in (TINY if tiny else SIZES)]


def measurement(size: Size, device: str) -> Measurement:
    """A few rows are in the cache anyway."""
    few = size.num_rows <= FEW
    sets = Sets(partial(make, size, device), 2 if few else sets_beyond_cache(size.num_bytes))
    number_type = str(size.dtype).removeprefix("torch.")
    peer = "torch sort" if size.op in ("truncate", "sample") else "torch"
    return Measurement(
        family="sampling",
        name=f"{size.op} K={size.num_rows} V={size.vocab_size} {number_type}" + " flat" * size.flat,
        run=sets.call(ours, size.op),
        num_bytes=size.num_bytes,
        bound="latency" if few else "copy",
        peers={peer: sets.call(by_torch, size.op)},
        num_sets=sets.count,
        target=size.target,
        peer_targets={} if size.sort_target is None else {peer: size.sort_target},
    )


def make(size: Size, device: str, number: int) -> tuple[Tensor, list[Tensor]]:
    """Logits [K, V], and of the rows temperature, top_k, top_p, min_p, seed, sample_index and
    position."""
    rng = torch.Generator(device).manual_seed(number)
    rows, size_of_row = shape = (size.num_rows, size.vocab_size)
    logits = torch.randn(shape, generator=rng, device=device) * 2
    if not size.flat:
        places = torch.randint(0, size_of_row, (rows, LIKELY), generator=rng, device=device)
        likely = torch.rand(places.shape, generator=rng, device=device) * 12 + 6
        logits.scatter_(1, places, likely)

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    stream = [torch.arange(rows, device=device) + start for start in (11, 0, 512)]
    top_k = full(0 if size.flat else 50, torch.int32)
    return logits.to(size.dtype), [full(0.8), top_k, full(0.9), full(0), *stream]


def ours(inputs: tuple[Tensor, list[Tensor]], op: str) -> object:
    """One call of the kernel."""
    logits, (temperature, top_k, top_p, min_p, seed, index, position) = inputs
    stream = seed, index, position
    if op == "gumbel_argmax":
        return sampling.gumbel_argmax(logits, temperature, min_p, *stream)
    if op == "truncate":
        return sampling.truncate(logits, top_k, top_p)
    return sampling.sample(logits, temperature, top_k, top_p, min_p, *stream)


def by_torch(inputs: tuple[Tensor, list[Tensor]], op: str) -> object:
    """The same in torch operations: what an engine without kernels does."""
    logits, (temperature, top_k, top_p, *_) = inputs
    if op == "truncate":
        return truncated_by_sort(logits.float(), top_k, top_p)
    scaled = logits.float() / temperature[:, None]
    return drawn(truncated_by_sort(scaled, top_k, top_p) if op == "sample" else scaled)


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
