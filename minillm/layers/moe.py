"""Mixture of experts: router, stacked experts and shared experts."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minillm import ops
from minillm.config import ModelConfig, MoEConfig
from minillm.layers.linear_methods import CheckpointTensor, Matrix, WeightSlice
from minillm.layers.mlp import MLP


@dataclass(frozen=True)
class ExpertNames:
    """Names of expert weights in the checkpoints of a model family."""

    block: str = "mlp."
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


class Router(Matrix):
    """Scores all experts for each token in float32, and selects the top k."""

    def __init__(self, prefix: str, hidden_size: int, moe: MoEConfig):
        super().__init__([WeightSlice.whole(f"{prefix}gate", moe.num_experts, hidden_size)])
        self.prefix, self.moe = prefix, moe
        # DeepSeek-V3's score correction bias: a buffer in checkpoints, not trained by gradient.
        bias = torch.empty(moe.num_experts, dtype=torch.float32) if moe.score_bias else None
        self.register_buffer("bias", bias)
        self.bias: Tensor | None

    def create(self, dtype: torch.dtype, device: torch.device | str) -> None:
        """For our kernels in float32, instead of a conversion in each step."""
        wide = ops.backend_of(torch.device(device)).name == "triton"
        super().create(torch.float32 if wide else dtype, device)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[N, d] -> weights [N, k] and expert ids [N, k]"""
        moe = self.moe
        logits = self.method.logits(self, x)  # [N, E]
        if moe.num_groups == 1 and ops.uses_kernels(logits):
            from minillm.ops import triton  # imported on a GPU only

            how = moe.num_experts_per_token, moe.scoring == "softmax", moe.normalize
            return triton.route(logits, self.bias, *how, moe.routed_scaling_factor)
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

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """The weight, and the score correction bias if there is one."""
        yield from super().checkpoint_tensors()
        if self.bias is not None:
            name = f"{self.prefix}gate.e_score_correction_bias"
            yield CheckpointTensor.plain(name, self.bias)


class Experts(nn.Module):
    """All experts of a layer in two stacked matrices, [E, 2 I, d] and [E, d, I].

    `tiled`: batch-invariant, for deterministic mode.
    """

    def __init__(self, prefix: str, hidden_size: int, moe: MoEConfig, names: ExpertNames):
        super().__init__()
        count, size = moe.num_experts, moe.intermediate_size
        experts = [f"{prefix}experts.{expert}." for expert in range(count)]
        gate_up = [
            WeightSlice.whole(f"{expert}{name}", size, hidden_size)
            for expert in experts
            for name in (names.gate, names.up)
        ]
        down = [WeightSlice.whole(f"{expert}{names.down}", hidden_size, size) for expert in experts]
        self.gate_up, self.down = Matrix(gate_up, count), Matrix(down, count)
        self.tiled = False

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """[N, d], [N, k], [N, k] -> [N, d]"""
        method = self.gate_up.method
        return method.experts(self.gate_up, self.down, x, weights, ids, self.tiled)


class MoE(nn.Module):
    """The weighted sum of each token's top k experts, plus the shared experts if there are any."""

    def __init__(self, config: ModelConfig, moe: MoEConfig, prefix: str, names: ExpertNames):
        super().__init__()
        prefix = f"{prefix}{names.block}"
        self.router = Router(prefix, config.hidden_size, moe)
        self.experts = Experts(prefix, config.hidden_size, moe, names)
        self.shared = None
        if moe.shared_intermediate_size:
            shared_prefix, size = f"{prefix}shared_experts.", moe.shared_intermediate_size
            self.shared = MLP(config, shared_prefix, size)

    def forward(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, d]"""
        out = self.experts(x, *self.router(x))
        return out if self.shared is None else out + self.shared(x)
