"""Decode layers on a GPU in six launches: norms, residual additions and SwiGLU within products.

    before   norm | qkv | rotation, cache | attention | o | norm | gate_up | SwiGLU | down
    here     add, norm, qkv | rotation, cache | attention | o | add, norm, gate_up, SwiGLU | down

Between two kernels of a CUDA graph an H100 does nothing for 1.3 microseconds (Spector et al., "No
Bubbles", 2025). With more than 8 rows o and down are cuBLAS's; with more than `FUSED_ROWS` of
`minillm/ops/triton.py` all products are, and cuBLAS fuses none of these.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor, nn

from minillm import ops
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear_methods import PlainLinearMethod
from minillm.layers.mlp import MLP
from minillm.models.all_layers import hooks_of
from minillm.models.decoder import Decoder, DecoderLayer, LayersMethod
from minillm.ops.batch import Batch


class FusedLayers(LayersMethod):
    """`Decoder.all_layers` of a dense model on a GPU.

    Takes no step with more rows than the kernels take, or if a module hook is set, or if the cache
    is not a `KVCache` in mode "fast".
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers: list[Any] = list(layers)
        self.is_watched = hooks_of(layers)

    @classmethod
    def of(cls, model: Decoder) -> "FusedLayers | None":
        """The instance for a model; None if a layer is not plain attention and a dense MLP."""
        layers = list(model.layers)
        return cls(layers) if all(map(fits, layers)) else None

    def takes(self, kv: AttentionBackend, x: Tensor) -> TypeGuard[KVCache]:
        if not isinstance(kv, KVCache) or kv.mode != "fast" or not ops.uses_kernels(x):
            return False
        from minillm.ops import triton  # imported on a GPU only

        return not self.is_watched() and triton.takes_normed(x)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: KVCache
    ) -> tuple[Tensor, Tensor]:
        from minillm.ops import triton

        residual: Any = None
        for layer in self.layers:
            attention, mlp = layer.attention, layer.mlp
            norm, qkv, gate_up = layer.input_norm, attention.qkv_proj, mlp.gate_up_proj
            weights = norm.weight, norm.eps, qkv.weight, qkv.bias
            heads, residual = triton.norm_linear(x, residual, *weights)
            x = attention.o_proj(attention.mix(heads, rope, batch, kv))
            norm = layer.mlp_norm
            weights = norm.weight, norm.eps, gate_up.weight, gate_up.bias
            gated, residual = triton.norm_linear(x, residual, *weights, gated=True)
            x = mlp.down_proj(gated)
        return x, residual


def fits(layer: Any) -> bool:
    """Whether the products that follow a layer's norms are plain ones, and no class is derived."""
    if type(layer) is not DecoderLayer or type(layer.attention) is not Attention:
        return False
    if type(layer.mlp) is not MLP or layer.mlp.activation is not ops.silu_mul:
        return False
    products = layer.attention.qkv_proj, layer.mlp.gate_up_proj
    return all(type(product.method) is PlainLinearMethod for product in products)
