"""All layers of a decoder in one C call, for supported models."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from minillm.config import ModelConfig, unknown_fields
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import Matrix, PanelLinearMethod
from minillm.layers.mla import LATENT_NORM_EPS, MLAttention
from minillm.layers.mlp import MLP
from minillm.layers.moe import MoE
from minillm.layers.panel_methods import PanelExpertsMethod, PanelHeadsMethod
from minillm.models.decoder import Decoder, DecoderLayer, LayersMethod
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm.ops.cpu_experts import ExpertShape, ExpertWeights
from minillm.ops.cpu_latent import LatentShape, LatentWeights
from minillm.ops.cpu_layers import NO_TAPS, Layers, LayerShape, LayerWeights
from minillm.ops.cpu_quantized import MatrixParts
from minillm.quantization.mixed import MixedMethod, members
from minillm.quantization.outliers import OutlierMethod
from minillm.quantization.panels import PanelQuantizedMethod


class AllLayers(LayersMethod):
    """`Decoder.all_layers` of a model whose weights are in panels.

    Takes no step if a module hook is set, torch operations are being intercepted, or the cache is
    not a `KVCache` in mode "fast".
    """

    def __init__(self, model: Decoder):
        # No reference to the model, which refers to this object: a cycle would delay freeing both.
        self.is_watched = hooks_of(model.layers)
        self.weights = [layer_weights(layer) for layer in model.layers]
        self.shape = layer_shape(model)
        self._layers: Layers | None = None
        self._sum: Callable[[Tensor], object] | None = None

    def add_up(self, all_reduce: Callable[[Tensor], object], owns_biases: bool) -> None:
        """Set up tensor parallelism: `all_reduce` sums the output [N, d] of attention and of the
        MLP in place. Exactly one rank owns the biases of these outputs."""
        self._sum = all_reduce
        if not owns_biases:
            self.weights = [without_biases(weight) for weight in self.weights]

    @classmethod
    def of(cls, model: Decoder) -> "AllLayers | None":
        """The instance for a model; None if `ops/c/layers.c` does not support all its layers."""
        if unknown_fields(model.config) or not all(map(fits, model.layers)):
            return None
        if not layer_shape(model).fits:
            return None
        return cls(model)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        batch: Batch,
        kv: KVCache,
        taps: Mapping[int, Tensor] = NO_TAPS,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after n layers are stored in the batch's slots of entry n of `taps`,
        [slots, d]."""
        if self._layers is None or self._layers.keys is not kv.key:
            self._layers = Layers(self.weights, self.shape, kv.key, kv.value, kv.pages)
        return self._layers.run(
            x,
            rope,
            batch.slot_mapping,
            batch.query_start,
            batch.seq_lens,
            batch.block_tables,
            batch.max_query_len,
            self._sum,
            taps,
            batch.tails,
        )

    def takes(self, kv: AttentionBackend, x: Tensor) -> TypeGuard[KVCache]:
        is_fast = isinstance(kv, KVCache) and kv.mode == "fast" and x.dtype == kv.dtype
        return is_fast and cpu.takes(x) and not self.is_watched()


def hooks_of(layers: Iterable[nn.Module]) -> Callable[[], bool]:
    """Tells whether a module has a hook, which would see nothing of one call for all layers."""
    modules = [module for layer in layers for module in layer.modules()]
    hooks = [hook for one in modules for hook in (one._forward_hooks, one._forward_pre_hooks)]
    return lambda: any(hooks) or _has_any_global_hook()


def without_biases(weights: LayerWeights) -> LayerWeights:
    """A layer without the biases that only one rank adds."""
    experts = weights.experts
    if experts is not None:
        experts = replace(experts, shared_down_bias=None)
    return replace(weights, o_bias=None, down_bias=None, experts=experts)


def fits(layer: Any) -> bool:
    """Whether C supports a layer's attention and its MLP or experts, with all weights in panels."""
    if type(layer) is not DecoderLayer:
        return False
    attention, mlp = layer.attention, layer.mlp
    if type(attention) not in (Attention, MLAttention) or type(mlp) not in (MLP, MoE):
        return False  # a subclass computes something else
    if isinstance(mlp, MoE) and not (
        isinstance(mlp.experts.gate_up.method, PanelExpertsMethod | PanelQuantizedMethod)
        and isinstance(mlp.router.method, PanelLinearMethod)
    ):
        return False
    if isinstance(attention, MLAttention) and not isinstance(
        attention.kv_b_proj.method, PanelHeadsMethod
    ):
        return False
    return all(
        isinstance(product.method, PanelLinearMethod | PanelQuantizedMethod)
        and not isinstance(product.method, OutlierMethod)
        for product in products(layer)
    )


def products(layer: Any) -> list[Matrix]:
    """The matrices of a layer that MLA does not absorb; of a mixed qkv its members."""
    qkv = getattr(layer.attention, "qkv_proj", None)
    mixed = qkv if qkv is not None and isinstance(qkv.method, MixedMethod) else None
    matrices = (one for one in layer.modules() if isinstance(one, Matrix) and one is not mixed)
    return [one for one in matrices if not one.is_absorbed]


def layer_weights(layer: Any) -> LayerWeights:
    """The tensors of a layer that `fits`."""
    attention, mlp = layer.attention, layer.mlp
    absorbed, mixed = isinstance(attention, MLAttention), isinstance(mlp, MoE)
    qkv = None if absorbed else attention.qkv_proj
    gate_up, down = (None, None) if mixed else (mlp.gate_up_proj, mlp.down_proj)
    normed = not absorbed and attention.q_norm is not None
    return LayerWeights(
        input_norm=layer.input_norm.weight,
        mlp_norm=layer.mlp_norm.weight,
        qkv=parts_of(qkv),
        qkv_bias=bias_of(qkv),
        q_norm=attention.q_norm.weight if normed else None,
        k_norm=attention.k_norm.weight if normed else None,
        o=parts_of(attention.o_proj),
        o_bias=attention.o_proj.bias,
        gate_up=parts_of(gate_up),
        gate_up_bias=bias_of(gate_up),
        down=parts_of(down),
        down_bias=bias_of(down),
        window=attention.window or 0,
        latent=latent_weights(attention) if absorbed else None,
        experts=expert_weights(mlp) if mixed else None,
    )


def parts_of(matrix: Matrix | None) -> Any:
    """A matrix as C reads it, if the layer has it."""
    chain = None
    for member in reversed([] if matrix is None else members(matrix)):
        method, parts = member.method, MatrixParts(member.weight)
        if isinstance(method, PanelQuantizedMethod):
            parts = method.parts(member)
        chain = replace(parts, outputs=member.out_features, next=chain)
    return chain


def bias_of(matrix: Linear | None) -> Tensor | None:
    """The bias, of a matrix that a layer may not have."""
    return None if matrix is None else matrix.bias


def latent_weights(attention: MLAttention) -> LatentWeights:
    """The tensors of MLA."""
    return LatentWeights(
        q_a=parts_of(attention.q_a_proj),
        q_a_bias=bias_of(attention.q_a_proj),
        q_a_norm=None if attention.q_a_norm is None else attention.q_a_norm.weight,
        q=parts_of(attention.q_proj),
        kv_a=parts_of(attention.kv_a_proj),
        kv_a_bias=attention.kv_a_proj.bias,
        kv_a_norm=attention.kv_a_norm.weight,
        keys=attention.kv_b_proj.weight,
        values=attention.kv_b_proj.get_parameter("value_panels"),
    )


def expert_weights(layer: MoE) -> ExpertWeights:
    """The tensors of a mixture of experts."""
    shared = layer.shared
    gate_up, down = (None, None) if shared is None else (shared.gate_up_proj, shared.down_proj)
    return ExpertWeights(
        router=layer.router.weight,
        bias=layer.router.bias,
        gate_up=parts_of(layer.experts.gate_up),
        down=parts_of(layer.experts.down),
        shared_gate_up=parts_of(gate_up),
        shared_gate_up_bias=bias_of(gate_up),
        shared_down=parts_of(down),
        shared_down_bias=bias_of(down),
    )


def layer_shape(model: Decoder) -> LayerShape:
    """The common shape of the layers of a model that `fits`."""
    attention: Any = model.layers[0].attention
    return shape_of(model.config, attention.scale)


def sizes_fit(config: ModelConfig) -> bool:
    """Whether C could compute all layers of a model with these sizes, its weights in panels."""
    inputs = config.hidden_size, 0 if config.mla else config.num_heads * config.head_dim
    whole = not any(size % cpu.PANEL_STEP for size in inputs)
    return whole and not unknown_fields(config) and shape_of(config).fits


def shape_of(config: ModelConfig, scale: float = 1.0) -> LayerShape:
    """The shape of layers with this configuration."""
    sparse = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
    return LayerShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate=0 if all(sparse) else config.intermediate_size,
        interleaved=config.rope.interleaved,
        eps=config.rms_norm_eps,
        qk_eps=config.rms_norm_eps,
        scale=scale,
        latent=latent_shape(config) if config.mla else None,
        experts=expert_shape(config) if any(sparse) else None,
    )


def latent_shape(config: ModelConfig) -> LatentShape:
    """The sizes of MLA."""
    mla: Any = config.mla
    return LatentShape(
        heads=config.num_heads,
        rank=mla.kv_lora_rank,
        nope=mla.qk_nope_head_dim,
        rope=mla.qk_rope_head_dim,
        value=mla.v_head_dim,
        q_rank=mla.q_lora_rank or 0,
        eps=LATENT_NORM_EPS,
    )


def expert_shape(config: ModelConfig) -> ExpertShape:
    """The sizes and the routing of a mixture of experts. Of a rank's part, those that it holds."""
    moe: Any = config.moe
    return ExpertShape(
        hidden=config.hidden_size,
        experts=moe.num_experts,
        chosen=moe.num_experts_per_token,
        size=moe.intermediate_size,
        shared_size=moe.shared_intermediate_size,
        sigmoid=moe.scoring == "sigmoid",
        normalize=moe.normalize,
        groups=moe.num_groups,
        top_groups=moe.topk_groups,
        best_two=moe.group_score == "top2",
        factor=moe.routed_scaling_factor,
    )
