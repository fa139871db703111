"""Weights in the layout that the processor reads fastest.

A checkpoint's matrix is stored row by row, an output each. A product with few rows of activations
is as slow as its weight is read, and it is read fastest front to back, in the order of use.
"""

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
from minillm.layers.norm import RMSNorm
from minillm.models.all_layers import AllLayers
from minillm.models.decoder import Decoder
from minillm.ops import c_library, cpu
from minillm_kernels import reference

logger = logging.getLogger(__name__)


@torch.inference_mode()
def pack_weights(model: Decoder) -> str:
    """Store the weights of a model on a CPU for serving; returns how, in a few words.

    Afterwards its parameters are not the checkpoint's any more: it can neither be trained nor
    saved. What no product reads as it is stays: experts, and the matrix that MLA absorbs.
    """
    matrices = packable(model)
    chosen = [each for each in matrices if cpu.takes_panels(each.values())]
    if chosen:
        into_panels(chosen)
    model.all_layers = AllLayers.of(model)
    count = sum(into_onednn(model, each) for each in matrices if each not in chosen)
    c_library.return_freed_memory()
    parts = [(len(chosen), "in panels"), (count, "packed by oneDNN")]
    plain = len(matrices) - len(chosen) - count
    parts.append((plain, "as in the checkpoint"))
    return ", ".join(f"{number} matrices {how}" for number, how in parts if number)


def copied_weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of what `pack_weights` keeps twice: an embedding that serves as output matrix, too,
    where the output is packed by oneDNN."""
    example = torch.zeros(32, config.hidden_size, dtype=dtype)
    if not config.tie_word_embeddings or cpu.takes_panels(example) or packed(example) is None:
        return 0
    return config.vocab_size * config.hidden_size * dtype.itemsize


def keep_plain(model: Decoder) -> None:
    """Leave a model to torch, operation by operation: to be counted, compared or understood."""
    model.plain_torch = True
    for layer in model.modules():
        if isinstance(layer, RMSNorm):
            layer.norm, layer.add_norm = reference.rms_norm, reference.add_rms_norm
        elif isinstance(layer, MLP):
            layer.activation = reference.silu_mul


def packable(model: Decoder) -> list[Linear | Embedding]:
    """The layers whose weight only their own product reads, the output matrix among them."""
    absorbed = {id(each.kv_b_proj) for each in model.modules() if isinstance(each, MLAttention)}
    kinds = Linear if model.lm_head is not None else Linear | Embedding
    found = [
        each
        for each in model.modules()
        if isinstance(each, kinds)
        and isinstance(each.method, PlainLinearMethod)
        and id(each) not in absorbed
    ]
    return sorted(found, key=lambda each: isinstance(each, Embedding))  # the output comes last


def into_panels(
    layers: Sequence[Matrix], method_of: Callable[[Matrix], PanelLinearMethod] | None = None
) -> None:
    """Panels for all of these, one behind another in one piece of memory with large pages: with
    small ones the processor would look up an address every 4 KiB of a weight."""
    methods = [
        PanelLinearMethod(each.out_features) if method_of is None else method_of(each)
        for each in layers
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
    """Packed by oneDNN, if it does. An embedding keeps its rows, which oneDNN would hide, and a
    second matrix serves as the output."""
    result = packed(layer.values())
    if result is None:
        return False
    if isinstance(layer, Embedding):
        layer = model.lm_head = Linear("", layer.in_features, {"lm_head": layer.out_features})
    layer.method, layer.weight = PackedLinearMethod(), frozen(result)
    return True
