"""The dense SwiGLU MLP."""

from collections.abc import Callable

from torch import Tensor, nn

from minillm import ops
from minillm.config import ModelConfig
from minillm.layers.linear import Linear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020), gate and up in one product.

    `activation` is silu(gate) * up, [N, 2 I] -> [N, I]. I is `intermediate_size`, by default that
    of the model.
    """

    def __init__(self, config: ModelConfig, prefix: str, intermediate_size: int | None = None):
        super().__init__()
        d, size = config.hidden_size, intermediate_size or config.intermediate_size
        outputs = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj = Linear(prefix, d, outputs, config.mlp_bias)
        self.activation: Callable[[Tensor], Tensor] = ops.silu_mul
        self.down_proj = Linear(prefix, size, {"down_proj": d}, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, d]"""
        return self.down_proj(self.activation(self.gate_up_proj(x)))
