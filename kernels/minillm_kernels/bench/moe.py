"""Benchmarks of mixture-of-experts layers: one token, a decoding batch, a long prompt."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from minillm_kernels import moe, reference
from minillm_kernels.bench.case import Measurement, Sets, sets_beyond_cache


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
    """One layer for all sets, whose ids lead to other experts in each. Peers: the loop over
    experts, which waits for the ids, and torch's own grouped product."""
    num_active = int(ids_of(size, 0).unique().numel())
    active = 6 * num_active * size.hidden_size * size.intermediate_size  # bytes
    layer = Sets(lambda number: make(size, device), 1)
    count = max(1, min(size.num_experts // size.top_k, sets_beyond_cache(active)))
    sets = Sets(lambda number: (*layer[0], ids_of(size, number).to(device)), count)
    between = 2 * size.num_pairs * (size.hidden_size + size.intermediate_size)  # written and read
    ends = 2 * size.num_tokens * size.hidden_size
    name = f"{size.model} {size.num_tokens} token{'s' * (size.num_tokens > 1)}"
    invariant = partial(moe.moe_experts, batch_invariant=size.batch_invariant)
    peers = {"torch loop over experts": sets.call(lambda inputs: reference.moe_experts(*inputs))}
    if hasattr(torch, "_grouped_mm"):
        peers["torch._grouped_mm"] = sets.call(lambda inputs: grouped_mm_experts(*inputs))
    return Measurement(
        family="moe",
        name=f"{name}, batch-invariant" if size.batch_invariant else name,
        run=sets.call(lambda inputs: invariant(*inputs)),
        num_bytes=active + 2 * (between * (size.num_tokens > 1) + ends),
        num_flops=6 * size.num_pairs * size.hidden_size * size.intermediate_size,
        bound="matmul" if size.num_pairs > 200 * size.num_experts else "copy",
        peers=peers,
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


def make(size: Size, device: str) -> tuple[Tensor, ...]:
    """x, gate_up, down, weights: random numbers; zeros would cost less power and look faster."""
    d, intermediate, num_experts = size.hidden_size, size.intermediate_size, size.num_experts

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, scale)

    x = draw(size.num_tokens, d)
    gate_up = draw(num_experts, 2 * intermediate, d, scale=d**-0.5)
    down = draw(num_experts, d, intermediate, scale=intermediate**-0.5)
    weights = torch.rand(size.num_tokens, size.top_k, device=device) / size.top_k
    return x, gate_up, down, weights


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
