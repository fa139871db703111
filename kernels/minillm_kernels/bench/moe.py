"""Benchmarks of mixture-of-experts layers: one token, a decoding batch, a long prompt."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from minillm_kernels import moe, reference
from minillm_kernels.bench import case
from minillm_kernels.bench.case import Bound, Sets


@dataclass(frozen=True)
class Size(case.Size):
    """A layer and a number of tokens."""

    model: str
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_tokens: int
    batch_invariant: bool = False

    @property
    def name(self) -> str:
        """What is computed."""
        name = f"{self.model} {self.num_tokens} token{'s' * (self.num_tokens > 1)}"
        return f"{name}, batch-invariant" if self.batch_invariant else name

    @property
    def num_pairs(self) -> int:
        """Tokens times their choices."""
        return self.num_tokens * self.top_k

    @property
    def num_flops(self) -> int:
        """Of three products for each pair."""
        return 6 * self.num_pairs * self.hidden_size * self.intermediate_size

    @property
    def weight_bytes(self) -> int:
        """Of the experts that have tokens."""
        num_active = int(self.ids(0).unique().numel())
        return 6 * num_active * self.hidden_size * self.intermediate_size

    @property
    def num_bytes(self) -> int:
        """Weights once, what is written and read between the products, and both ends."""
        between = 2 * self.num_pairs * (self.hidden_size + self.intermediate_size)
        ends = 2 * self.num_tokens * self.hidden_size
        return self.weight_bytes + 2 * (between * (self.num_tokens > 1) + ends)

    @property
    def bound(self) -> Bound:
        """By the rows of an expert."""
        return "matmul" if self.num_pairs > 200 * self.num_experts else "copy"

    @property
    def num_sets(self) -> int:
        """As many as there are other experts for."""
        return max(1, min(self.num_experts // self.top_k, 1 + -(-case.CACHE // self.weight_bytes)))

    def sets(self, device: str) -> Sets:
        """One layer for all sets, whose ids lead to other experts in each."""
        layer = Sets(partial(self.make, device), 1)
        return Sets(lambda number: (*layer[0], self.ids(number).to(device)), self.num_sets)

    def ids(self, number: int) -> Tensor:
        """Ids [N, k] of input set `number`.

        One token's experts are others in each set, or they would be in the cache; many tokens
        choose at random, so that experts get unequal numbers of rows as they do in a model.
        """
        if self.num_tokens > 1:
            rng = torch.Generator().manual_seed(number)
            liking = torch.rand(self.num_tokens, self.num_experts, generator=rng)
            return liking.topk(self.top_k, dim=-1).indices
        order = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(0))
        return order[(torch.arange(self.top_k) + number * self.top_k) % self.num_experts][None]

    def make(self, device: str, number: int) -> tuple[Tensor, ...]:
        """x, gate_up, down, weights: random numbers; zeros would cost less power."""
        d, intermediate, num_experts = self.hidden_size, self.intermediate_size, self.num_experts

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, scale)

        x = draw(self.num_tokens, d)
        gate_up = draw(num_experts, 2 * intermediate, d, scale=d**-0.5)
        down = draw(num_experts, d, intermediate, scale=intermediate**-0.5)
        weights = torch.rand(self.num_tokens, self.top_k, device=device) / self.top_k
        return x, gate_up, down, weights

    def run(self, inputs: tuple[Tensor, ...]) -> object:
        """The kernels."""
        return moe.moe_experts(*inputs, batch_invariant=self.batch_invariant)

    def peers(self) -> Mapping[str, Callable[[Any], object]]:
        """The loop over experts, which waits for the ids, and torch's own grouped product."""
        return {
            "torch loop over experts": lambda inputs: reference.moe_experts(*inputs),
            "torch._grouped_mm": lambda inputs: grouped_mm_experts(*inputs),
        }


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


SIZES = (
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 1, target=0.72),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 32),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 4096, target=0.57),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 1, batch_invariant=True),
    Size("Qwen3-30B-A3B", 128, 8, 2048, 768, 4096, batch_invariant=True),
    Size("Mixtral-8x7B", 8, 2, 4096, 14336, 1),
    Size("Mixtral-8x7B", 8, 2, 4096, 14336, 4096),
    Size("DeepSeek-V2-Lite", 64, 6, 2048, 1408, 1),
    Size("DeepSeek-V2-Lite", 64, 6, 2048, 1408, 4096),
)
TINY = (
    Size("toy", 8, 2, 32, 24, 1, target=0.72),
    Size("toy", 4, 2, 32, 24, 6, target=0.57),
    Size("toy", 4, 2, 32, 24, 3, batch_invariant=True),
)
