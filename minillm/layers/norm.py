"""RMSNorm."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minillm import ops
from minillm.layers.linear_methods import CheckpointTensor, frozen


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension (Zhang and Sennrich, 2019)."""

    def __init__(self, name: str, size: int, eps: float):
        super().__init__()
        self.name = name
        self.eps = eps
        self.weight = frozen(torch.empty(size))  # the loader fills it
        self.norm, self.add_norm = ops.rms_norm, ops.add_rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """[.., d] -> [.., d]"""
        return self.norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """norm(x + residual) and x + residual, both [N, d]. A residual of None is zero."""
        if residual is None:
            return self(x), x
        return self.add_norm(x, residual, self.weight, self.eps)

    def checkpoint_tensors(self) -> Iterator[CheckpointTensor]:
        """The weight."""
        yield CheckpointTensor.plain(f"{self.name}.weight", self.weight.data)
