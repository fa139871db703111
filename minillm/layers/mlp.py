"""The dense SwiGLU MLP."""

from collections.abc import Callable

from torch import Tensor, nn

from minillm import ops
from minillm.layers.linear import Linear


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020), gate and up in one product.

    `activation` is silu(gate) * up, [N, 2 I] -> [N, I].
    """

    def __init__(self, prefix: str, hidden_size: int, intermediate_size: int, bias: bool = False):
        super().__init__()
        outputs = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = Linear(prefix, hidden_size, outputs, bias)
        self.activation: Callable[[Tensor], Tensor] = ops.silu_mul
        self.down_proj = Linear(prefix, intermediate_size, {"down_proj": hidden_size}, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, d]"""
        return self.down_proj(self.activation(self.gate_up_proj(x)))
