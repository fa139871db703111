"""Benchmarks of mixture-of-experts layers: one token, a decoding batch, a long prompt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minillm_kernels import moe, reference
from minillm_kernels.bench.case import Call, Measurement, sets_beyond_cache


@dataclass(frozen=True)
class Size:
    """A layer and a number of tokens, with the share of the ceiling that is wanted."""

    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    target: float | None = None
    batch_invariant: bool = False

    @property
    def num_pairs(self) -> int:
        """Tokens times their choices."""
        return self.num_tokens * self.top_k


SIZES = (
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 1, 0.72),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 32),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 4096, 0.57),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 1, batch_invariant=True),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 4096, batch_invariant=True),
    Size("Mixtral-8x7B", 8, 2, 4096, 14336, 1),
    Size("Mixtral-8x7B", 8, 2, 4096, 14336, 4096),
    Size("DeepSeek-V2-Lite", 64, 6, 2048, 1408, 1),
    Size("DeepSeek-V2-Lite", 64, 6, 2048, 1408, 4096),
)
TINY = (
    Size("toy", 8, 2, 32, 24, 1, 0.72),
    Size("toy", 4, 2, 32, 24, 6, 0.57),
    Size("toy", 4, 2, 32, 24, 3, batch_invariant=True),
)


def measurements(tiny: bool = False) -> list[Measurement]:
    """The targets of one H200 and their neighbours; `tiny` ones at toy sizes on the CPU."""
    return [measurement(size, "cpu" if tiny else "cuda") for size in (TINY if tiny else SIZES)]


def measurement(size: Size, device: str) -> Measurement:
    """Weights are made at the first call, so that a list of measurements costs no memory."""
    sets = Sets(size, device)
    weights = 3 * sets.num_active * size.hidden_size * size.intermediate_size
    between = 2 * size.num_pairs * (size.hidden_size + size.intermediate_size)  # written and read
    ends = 2 * size.num_tokens * size.hidden_size
    name = f"{size.model} {size.num_tokens} token{'s' * (size.num_tokens > 1)}"
    return Measurement(
        family="moe",
        name=f"{name}, batch-invariant" if size.batch_invariant else name,
        run=sets.call(
            lambda *inputs: moe.moe_experts(*inputs, batch_invariant=size.batch_invariant)
        ),
        num_bytes=2 * (weights + between * (size.num_tokens > 1) + ends),
        num_flops=6 * size.num_pairs * size.hidden_size * size.intermediate_size,
        bound="matmul" if size.num_pairs > 200 * size.num_experts else "copy",
        peers=sets.peers(),
        num_sets=sets.count,
        target=size.target,
    )


def ids_of(size: Size, number: int) -> Tensor:
    """Ids [N, k] of input set `number`.

    One token's experts are others in each set, or they would be in the cache; many tokens choose at
    random, so that experts get unequal numbers of rows as they do in a model.
    """
    if size.num_tokens > 1:
        rng = torch.Generator().manual_seed(number)
        liking = torch.rand(size.num_tokens, size.num_experts, generator=rng)
        return liking.topk(size.top_k, dim=-1).indices
    order = torch.randperm(size.num_experts, generator=torch.Generator().manual_seed(0))
    return order[(torch.arange(size.top_k) + number * size.top_k) % size.num_experts][None]


class Sets:
    """The tensors of a measurement: one layer, and ids that lead to other experts in each set."""

    def __init__(self, size: Size, device: str):
        self.size, self.device = size, device
        self.made: tuple[list[Tensor], list[Tensor]] | None = None
        self.num_active = int(ids_of(size, 0).unique().numel())
        active = 6 * self.num_active * size.hidden_size * size.intermediate_size  # bytes
        self.count = max(1, min(size.num_experts // size.top_k, sets_beyond_cache(active)))

    def inputs(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """x, gate_up, down, weights, ids of one set."""
        if self.made is None:
            self.made = self.make()
        (x, gate_up, down, weights), ids = self.made
        return x, gate_up, down, weights, ids[number % self.count]

    def make(self) -> tuple[list[Tensor], list[Tensor]]:
        """Random numbers on the device; zeros would cost less power and look faster."""
        size = self.size
        d, intermediate, num_experts = size.hidden_size, size.intermediate_size, size.num_experts

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            drawn = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            return drawn.normal_(0, scale)

        x = draw(size.num_tokens, d)
        gate_up = draw(num_experts, 2 * intermediate, d, scale=d**-0.5)
        down = draw(num_experts, d, intermediate, scale=intermediate**-0.5)
        weights = torch.rand(size.num_tokens, size.top_k, device=self.device) / size.top_k
        ids = [ids_of(size, number).to(self.device) for number in range(self.count)]
        return [x, gate_up, down, weights], ids

    def call(self, function: Callable[..., Tensor]) -> Call:
        """A call of `function` with the inputs of a set."""
        return lambda number: function(*self.inputs(number))

    def peers(self) -> Mapping[str, Call]:
        """The loop over experts, which waits for the ids, and torch's own grouped product."""
        found = {"torch loop over experts": self.call(reference.moe_experts)}
        if hasattr(torch, "_grouped_mm"):
            found["torch._grouped_mm"] = self.call(grouped_mm_experts)
        return found


def grouped_mm_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor
) -> Tensor:
    """The same by torch's grouped products, sorted by torch; bf16 on Hopper and newer."""
    top_k, num_experts = ids.shape[1], len(gate_up)
    order = ids.flatten().argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    counts.scatter_add_(0, ids.flatten(), torch.ones_like(ids.flatten(), dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    product = torch._grouped_mm(x[order // top_k], gate_up.mT, offs=ends)
    contribution = torch._grouped_mm(reference.silu_mul(product), down.mT, offs=ends)
    weighted = contribution * weights.flatten()[order, None]
    return torch.zeros_like(x).index_add_(0, order // top_k, weighted.to(x.dtype))
