"""Benchmarks of choosing tokens: one request's step, and a batch's with and without truncation.

Logits are as peaked as a language model's: normal numbers with a few tokens far above them. The
"flat" ones have more tokens within top-p than the search gathers, which is its worst case.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from minillm_kernels import sampling
from minillm_kernels.bench.case import Call, Measurement, sets_beyond_cache

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
    """Logits are made at the first call, so that a list of measurements costs no memory."""
    sets = Sets(size, device)
    number_type = str(size.dtype).removeprefix("torch.")
    peer = "torch sort" if size.op in ("truncate", "sample") else "torch"
    latency = size.num_rows <= FEW
    return Measurement(
        family="sampling",
        name=f"{size.op} K={size.num_rows} V={size.vocab_size} {number_type}" + " flat" * size.flat,
        run=sets.run,
        num_bytes=size.num_bytes,
        bound="latency" if latency else "copy",
        peers={peer: sets.peer()},
        num_sets=sets.count,
        target=size.target,
        peer_targets={} if size.sort_target is None else {peer: size.sort_target},
    )


@dataclass
class Sets:
    """The logits of a measurement, and the parameters of its rows."""

    size: Size
    device: str
    made: list[Tensor] = field(default_factory=list)
    parameters: list[Tensor] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Input sets, together larger than the cache; two where they would be in it anyway."""
        if self.size.num_rows <= FEW:
            return 2
        return sets_beyond_cache(self.size.num_bytes)

    def logits(self, number: int) -> Tensor:
        """One set's [K, V]."""
        if not self.made:
            self.made = [self.draw(index) for index in range(self.count)]
            self.parameters = self.draw_parameters()
        return self.made[number % self.count]

    def draw(self, number: int) -> Tensor:
        """Random logits on the device."""
        rng = torch.Generator(self.device).manual_seed(number)
        shape = (self.size.num_rows, self.size.vocab_size)
        logits = torch.randn(shape, generator=rng, device=self.device) * 2
        if not self.size.flat:
            places = torch.randint(
                0, shape[1], (shape[0], LIKELY), generator=rng, device=self.device
            )
            likely = torch.rand(places.shape, generator=rng, device=self.device) * 12 + 6
            logits.scatter_(1, places, likely)
        return logits.to(self.size.dtype)

    def draw_parameters(self) -> list[Tensor]:
        """Temperature, top_k, top_p, min_p, seed, sample_index, position."""
        rows = self.size.num_rows

        def full(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self.device)

        numbers = [torch.arange(rows, device=self.device) + start for start in (11, 0, 512)]
        top_k = full(0 if self.size.flat else 50, torch.int32)
        top_p, zeros = full(0.9, torch.float32), full(0, torch.float32)
        return [full(0.8, torch.float32), top_k, top_p, zeros, *numbers]

    def run(self, number: int) -> object:
        """One call of the kernel."""
        logits = self.logits(number)
        temperature, top_k, top_p, min_p, seed, sample_index, position = self.parameters
        stream = (seed, sample_index, position)
        if self.size.op == "gumbel_argmax":
            return sampling.gumbel_argmax(logits, temperature, min_p, *stream)
        if self.size.op == "truncate":
            return sampling.truncate(logits, top_k, top_p)
        return sampling.sample(logits, temperature, top_k, top_p, min_p, *stream)

    def peer(self) -> Call:
        """The same in torch operations: what an engine without kernels does."""

        def call(number: int) -> object:
            logits = self.logits(number)
            temperature, top_k, top_p, *_ = self.parameters
            if self.size.op == "truncate":
                return truncated_by_sort(logits.float(), top_k, top_p)
            scaled = logits.float() / temperature[:, None]
            if self.size.op == "sample":
                scaled = truncated_by_sort(scaled, top_k, top_p)
            return drawn(scaled)

        return call


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
