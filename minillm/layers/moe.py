"""Mixture of experts: a router, stacked experts, and a shared MLP beside them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minillm import ops
from minillm.config import ModelConfig, MoEConfig
from minillm.layers.linear import empty_parameter
from minillm.layers.mlp import MLP


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the parts of its experts in the checkpoint."""

    block: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Router(nn.Module):
    """Scores every expert for every token in float32, and chooses."""

    def __init__(self, prefix: str, hidden_size: int, moe: MoEConfig):
        super().__init__()
        self.prefix, self.moe = prefix, moe
        self.weight = empty_parameter(moe.num_experts, hidden_size)
        # A checkpoint buffer, never trained by gradient and not zero in real models.
        bias = torch.empty(moe.num_experts, dtype=torch.float32) if moe.score_bias else None
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, d] -> weights [N, k] and expert ids [N, k]"""
        moe = self.moe
        logits = F.linear(x.float(), self.weight.float())  # [N, E]
        scores = logits.softmax(-1) if moe.scoring == "softmax" else logits.sigmoid()
        weights, ids = ops.moe_route(
            scores,
            self.bias,
            moe.num_experts_per_token,
            moe.num_groups,
            moe.topk_groups,
            moe.group_score,
            moe.normalize,
        )
        return weights * moe.routed_scaling_factor, ids

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each checkpoint name with the view of this layer that holds it."""
        yield f"{self.prefix}gate.weight", self.weight.data
        if self.bias is not None:
            yield f"{self.prefix}gate.e_score_correction_bias", self.bias


# x [N, d], gate_up, down, weights [N, k], ids [N, k] -> [N, d]
ExpertsMethod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Experts(nn.Module):
    """All experts of a layer in two stacked tensors; `method` is how tokens pass through them."""

    def __init__(self, prefix: str, hidden_size: int, moe: MoEConfig, names: ExpertNames):
        super().__init__()
        self.prefix, self.names, size = prefix, names, moe.intermediate_size
        self.gate_up = empty_parameter(moe.num_experts, 2 * size, hidden_size)
        self.down = empty_parameter(moe.num_experts, hidden_size, size)
        self.method: ExpertsMethod = ops.moe_experts

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[N, d], [N, k], [N, k] -> [N, d]"""
        return self.method(x, self.gate_up, self.down, weights, ids)

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Each checkpoint name with the view of this layer that holds it."""
        size = self.down.shape[2]
        for expert in range(len(self.down)):
            prefix = f"{self.prefix}experts.{expert}."
            yield f"{prefix}{self.names.gate}.weight", self.gate_up.data[expert, :size]
            yield f"{prefix}{self.names.up}.weight", self.gate_up.data[expert, size:]
            yield f"{prefix}{self.names.down}.weight", self.down.data[expert]


class MoE(nn.Module):
    """Each token passes through its chosen experts, and through the shared MLP if there is one."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, prefix: str, names: ExpertNames):
        super().__init__()
        prefix = f"{prefix}{names.block}"
        self.router = Router(prefix, config.hidden_size, moe)
        self.experts = Experts(prefix, config.hidden_size, moe, names)
        self.shared = None
        if moe.shared_intermediate_size:
            shared_prefix, size = f"{prefix}shared_experts.", moe.shared_intermediate_size
            self.shared = MLP(shared_prefix, config.hidden_size, size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, d]"""
        out = self.experts(x, *self.router(x))
        return out if self.shared is None else out + self.shared(x)
