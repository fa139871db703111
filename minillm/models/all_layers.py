"""All layers of a dense decoder in one C call, for supported models."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import PanelLinearMethod
from minillm.layers.mlp import MLP
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm.ops.cpu_layers import Layers, LayerShape, LayerWeights


class AllLayers:
    """`Decoder.all_layers` of a model whose weights are in panels.

    Returns None, so that the layers run one by one, if a module hook is set, torch operations are
    being intercepted, or the cache is not a `KVCache` in mode "fast".
    """

    def __init__(self, model: Decoder):
        # No reference to the model, which refers to this object: a cycle would delay freeing both.
        modules = [each for layer in model.layers for each in layer.modules()]
        self.hooks = [each._forward_hooks for each in modules]
        self.hooks += [each._forward_pre_hooks for each in modules]
        self.weights = [layer_weights(layer) for layer in model.layers]
        self.shape = layer_shape(model)
        self._layers: Layers | None = None
        self._sum: Callable[[Tensor], object] | None = None

    def add_up(self, all_reduce: Callable[[Tensor], object], owns_biases: bool) -> None:
        """Set up tensor parallelism: `all_reduce` sums the output [N, d] of attention and of the
        MLP in place. Exactly one rank owns the biases of these outputs."""
        self._sum = all_reduce
        if not owns_biases:
            self.weights = [replace(each, o_bias=None, down_bias=None) for each in self.weights]

    @classmethod
    def of(cls, model: Decoder) -> "AllLayers | None":
        """The instance for a model; None if `ops/c/layers.c` does not support all its layers."""
        if not all(fits(layer) for layer in model.layers) or not layer_shape(model).fits:
            return None
        return cls(model)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor], batch: Batch, kv: AttentionBackend
    ) -> tuple[Tensor, Tensor] | None:
        """[N, d] -> two of [N, d], as `DecoderLayer.forward` of the last layer returns them."""
        if not isinstance(kv, KVCache) or not self._may(x, kv):
            return None
        if self._layers is None or self._layers.keys is not kv.key:
            self._layers = Layers(self.weights, self.shape, kv.key, kv.value)
        return self._layers.run(
            x,
            rope,
            batch.slot_mapping,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.max_query_len,
            self._sum,
        )

    def _may(self, x: Tensor, kv: KVCache) -> bool:
        if kv.mode != "fast" or x.dtype != kv.key.dtype or not cpu.takes(x):
            return False
        return not (any(self.hooks) or _has_any_global_hook())


def fits(layer: nn.Module) -> bool:
    """Whether a layer is grouped-query attention and a dense MLP, with all weights in panels."""
    if not isinstance(layer, DecoderLayer):
        return False
    attention, mlp = layer.attention, layer.mlp
    if not isinstance(attention, Attention) or not isinstance(mlp, MLP):
        return False
    return all(isinstance(each.method, PanelLinearMethod) for each in matrices(attention, mlp))


def matrices(attention: Attention, mlp: MLP) -> tuple[Linear, Linear, Linear, Linear]:
    """The four matrices of a layer, in order of use."""
    return attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj


def layer_weights(layer: Any) -> LayerWeights:
    """The tensors of a layer that `fits`."""
    attention, mlp = layer.attention, layer.mlp
    qkv, o, gate_up, down = matrices(attention, mlp)
    normed = attention.q_norm is not None
    return LayerWeights(
        input_norm=layer.input_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        qkv=qkv.weight,
        qkv_bias=qkv.bias,
        q_norm=attention.q_norm.weight if normed else None,
        k_norm=attention.k_norm.weight if normed else None,
        o=o.weight,
        o_bias=o.bias,
        gate_up=gate_up.weight,
        gate_up_bias=gate_up.bias,
        down=down.weight,
        down_bias=down.bias,
        window=attention.window,
    )


def layer_shape(model: Decoder) -> LayerShape:
    """The common shape of the layers of a model that `fits`."""
    config = model.config
    first: Any = model.layers[0]
    return LayerShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        interleaved=config.rope.interleaved,
        eps=config.rms_norm_eps,
        qk_eps=config.rms_norm_eps,
        scale=first.attention.scale,
    )
