"""Packs weights into the layout that a CPU reads fastest.

A checkpoint stores a matrix row by row, one row per output. A product with few rows of activations
is bound by reading its weight, which is fastest sequentially, in the order of use.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.layers.linear import Embedding, Linear
from minillm.layers.linear_methods import (
    Matrix,
    PackedLinearMethod,
    PanelLinearMethod,
    PlainLinearMethod,
    frozen,
    packed,
)
from minillm.layers.mla import MLAttention
from minillm.layers.mlp import MLP
from minillm.layers.moe import MoE
from minillm.layers.norm import RMSNorm
from minillm.layers.panel_methods import PanelExpertsMethod, pack_heads
from minillm.models.all_layers import AllLayers
from minillm.models.decoder import Decoder
from minillm.ops import c_library, cpu
from minillm.quantization.methods import to_dense
from minillm.quantization.outliers import separate_outliers
from minillm.quantization.panels import PanelQuantizedMethod, pack_quantized, runs_in_panels
from minillm_kernels import reference

logger = logging.getLogger(__name__)


@torch.inference_mode()
def pack_weights(model: Decoder) -> str:
    """Pack the weights of a model on a CPU for serving. Returns a summary for the log.

    The packed model can neither be trained nor saved. Experts and the matrix that MLA absorbs are
    packed in panels only, because oneDNN has no such products.
    """
    num_quantized = pack_quantized(may_be_panels(model))
    separate_outliers(list_matrices(model))
    output = model.embedding if model.lm_head is None else model.lm_head
    if isinstance(output, Matrix) and isinstance(output.method, PanelQuantizedMethod):
        output.method.round_twice()
    unpack_others(model)
    matrices = packable(model)
    chosen = [matrix for matrix in matrices if cpu.takes_panels(matrix.values())]
    if chosen:
        into_panels(chosen)
    pack_parts(model)
    model.all_layers = AllLayers.of(model)
    count = sum(into_onednn(model, matrix) for matrix in matrices if matrix not in chosen)
    c_library.return_freed_memory()
    parts = [(len(chosen), "in panels"), (num_quantized, "quantised in panels")]
    parts.append((count, "packed by oneDNN"))
    plain = len(matrices) - len(chosen) - count
    parts.append((plain, "as in the checkpoint"))
    return ", ".join(f"{number} matrices {how}" for number, how in parts if number)


def copied_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of weights that `pack_weights` duplicates: a tied embedding, if the output matrix is
    packed by oneDNN."""
    example = torch.zeros(32, config.hidden_size, dtype=dtype)
    if not config.tie_word_embeddings or cpu.takes_panels(example) or packed(example) is None:
        return 0
    return config.vocab_size * config.hidden_size * dtype.itemsize


def keep_plain(model: Decoder) -> None:
    """Make a model run only torch operations, for counting, comparison and teaching."""
    model.plain_torch = True
    for layer in model.modules():
        if isinstance(layer, RMSNorm):
            layer.norm, layer.add_norm = reference.rms_norm, reference.add_rms_norm
        elif isinstance(layer, MLP):
            layer.activation = reference.silu_mul


def packable(model: Decoder) -> list[Linear | Embedding]:
    """The layers whose weight is used only in their own product, with the output matrix last."""
    kinds = Linear if model.lm_head is not None else Linear | Embedding
    modules = [
        module
        for module in model.modules()
        if isinstance(module, kinds)
        and isinstance(module.method, PlainLinearMethod)
        and not module.is_absorbed
    ]
    return sorted(modules, key=lambda module: isinstance(module, Embedding))


@torch.inference_mode()
def unpack_others(model: Decoder) -> None:
    """Make the quantised matrices of a model on a CPU dense that are not packed in panels."""
    dense = [matrix for matrix in list_matrices(model) if to_dense(matrix)]
    if dense:
        logger.info(
            "Weights: %s quantised matrices are dense in memory, %.1f MB, because no C function "
            "reads them; `minillm inspect` lists them.",
            len(dense),
            sum(matrix.num_bytes for matrix in dense) / 1e6,
        )


def list_matrices(model: nn.Module) -> list[Matrix]:
    """All matrices of a model, or of its layers."""
    return [module for module in model.modules() if isinstance(module, Matrix)]


def may_be_panels(model: Decoder) -> list[Matrix]:
    """The matrices that may be quantised in panels. Not the experts of a layer if only gate_up or
    only down could be, nor the matrix that MLA absorbs, nor routers."""
    left_out = {matrix for matrix in list_matrices(model) if matrix.is_absorbed}
    for layer in model.modules():
        if isinstance(layer, MoE):
            pair = {layer.experts.gate_up, layer.experts.down}
            left_out |= {layer.router}  # its logits are not rounded
            left_out |= set() if all(map(runs_in_panels, pair)) else pair
    return [matrix for matrix in list_matrices(model) if matrix not in left_out]


def pack_parts(model: nn.Module) -> None:
    """Pack routers, experts and the matrices that MLA absorbs into panels, if their sizes fit."""
    for layer in model.modules():
        if isinstance(layer, MoE):
            pack_experts(layer)
        elif isinstance(layer, MLAttention):
            mla, matrix = layer.mla, layer.kv_b_proj
            sizes = mla.qk_nope_head_dim, mla.v_head_dim
            whole = not any(size % cpu.PANEL_STEP for size in sizes)
            if whole and is_plain(matrix) and cpu.takes_panels(matrix.values()):
                pack_heads(matrix, layer.num_heads, *sizes)


def pack_experts(layer: MoE) -> None:
    """Pack the experts and the router of a layer, if their sizes fit."""
    experts: Sequence[Matrix] = (layer.experts.gate_up, layer.experts.down)
    if all(isinstance(expert.method, PanelQuantizedMethod) for expert in experts):
        if is_plain(layer.router) and cpu.takes_panels(layer.router.values()):
            into_panels([layer.router])
        return
    weights = [expert.values()[0] for expert in experts if is_plain(expert)]
    if len(weights) < 2 or not all(
        cpu.takes_panels(weight) and len(weight) % cpu.PANEL_STEP == 0 for weight in weights
    ):
        return
    into_panels(experts, lambda matrix: PanelExpertsMethod(matrix.out_features))
    if is_plain(layer.router):
        into_panels([layer.router])


def is_plain(matrix: Matrix) -> bool:
    """Whether a matrix is stored as in the checkpoint."""
    return isinstance(matrix.method, PlainLinearMethod)


def into_panels(
    layers: Sequence[Matrix], method_of: Callable[[Matrix], PanelLinearMethod] | None = None
) -> None:
    """Pack these layers into panels, consecutively in one allocation with huge pages: 4 KiB pages
    would cost a TLB miss each."""
    methods = [
        PanelLinearMethod(linear.out_features) if method_of is None else method_of(linear)
        for linear in layers
    ]
    shapes = [
        cpu.panels_shape(layer.out_features, method.width(layer.in_features))
        for layer, method in zip(layers, methods, strict=True)
    ]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    memory = layers[0].values().new_empty(sum(sizes))
    c_library.use_large_pages(memory.data_ptr(), memory.nbytes)
    places = map(Tensor.view, memory.split(sizes), shapes)
    for layer, method, panels in zip(layers, methods, places, strict=True):
        cpu.pack_panels(method.arranged(layer.values()), panels)
        layer.method = method
        layer.weight = frozen(panels)


def into_onednn(model: Decoder, layer: Linear | Embedding) -> bool:
    """Pack a layer with oneDNN; False if that is unavailable. A tied embedding stays unpacked for
    lookups, and `lm_head` becomes a packed copy."""
    result = packed(layer.values())
    if result is None:
        return False
    if isinstance(layer, Embedding):
        layer = model.lm_head = Linear("", layer.in_features, {"lm_head": layer.out_features})
    layer.method, layer.weight = PackedLinearMethod(), frozen(result)
    return True
