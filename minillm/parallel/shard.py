"""A rank's part of a model: which rows and columns its layers hold, and where ranks communicate.

A rank has the usual layers with its own sizes (`split.rank_config`). Before they have memory,
`slice_matrices` selects their slices of the checkpoint; after loading, `connect` adds a sum after
each product whose inputs are split:

    x --> qkv (rows) --> attention of own heads --> o (columns) --> sum --> x
    x --> gate, up (rows) --> own units ----------> down (columns) --> sum --> x

Two sums per layer, and one for the embedding; sampling is in `sampler.py`. The bias of a split
product is added once, after the sum. The router and the latent cache of MLA are equal on all ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from minillm.config import ModelConfig
from minillm.layers.linear_methods import LinearMethod, Matrix, WeightSlice, finished
from minillm.layers.moe import Experts, MoE
from minillm.models.all_layers import AllLayers
from minillm.models.decoder import Decoder
from minillm.models.packing import list_matrices
from minillm.parallel.communicator import Communicator
from minillm.parallel.experts import OwnExperts, share_experts
from minillm.parallel.split import Split, stage_config

LAYER = re.compile(r"(?<=model\.layers)\.\d+")

# ---- slices ------------------------------------------------------------------------------------


def slice_matrices(
    model: Decoder, whole: ModelConfig, split: Split, experts: Sequence[int] | None = None
) -> None:
    """Select the rows and columns of the checkpoint that a rank's layers hold; `experts` lists its
    experts where these are whole."""
    if split.size > 1:
        shapes = whole_shapes(whole)
        for matrix in list_matrices(model):
            matrix.parts = tuple(
                slice_of(part.name, shapes[LAYER.sub("", part.name)], part.shape, split)
                for part in matrix.parts
            )
    for layer in model.modules():
        if isinstance(layer, Experts) and experts is not None:
            share_experts(layer, experts)
    for matrix in vocabulary_matrices(model):
        (part,) = matrix.parts
        matrix.parts = (replace(part, rows=split.vocabulary(whole.vocab_size)),)


def whole_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and columns of each matrix of a whole model, by name without the number of its layer:
    the first layers are built, up to one of each kind."""
    kinds = [config.is_moe_layer(layer) for layer in range(config.num_layers)]
    first = stage_config(config, range(1 + max(map(kinds.index, set(kinds)))))
    found: dict[str, tuple[int, int]] = {}

    def note(model: Decoder) -> None:
        parts = (part for matrix in list_matrices(model) for part in matrix.parts)
        found.update((LAYER.sub("", part.name), part.shape) for part in parts)

    Decoder(first, device="meta", shard=note)  # called before parts are merged
    return found


def slice_of(name: str, whole: tuple[int, int], held: tuple[int, int], split: Split) -> WeightSlice:
    """A rank's slice of shape `held` of the matrix `name`. There are as many slices as ranks, or
    fewer that several ranks hold, as of KV heads: one of all rows or all columns."""
    starts = (split.kv_heads(whole[side] // held[side]).start * held[side] for side in (0, 1))
    rows, columns = (range(at, at + size) for at, size in zip(starts, held, strict=True))
    return WeightSlice(name, whole, rows, columns)


def vocabulary_matrices(model: Decoder) -> list[Matrix]:
    """The embedding and the output matrix, as far as this stage has them."""
    return [matrix for matrix in (model.embedding, model.lm_head) if isinstance(matrix, Matrix)]


# ---- communication -----------------------------------------------------------------------------


class RowParallel(LinearMethod):
    """A product with a rank's columns, summed over ranks; the bias is added after the sum."""

    def __init__(self, inner: LinearMethod, communicator: Communicator):
        self.inner, self.communicator = inner, communicator

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        total = self.communicator.sum(self.inner.partial(matrix, x).contiguous())
        return finished(total, bias, x.dtype)

    def values(self, matrix: Matrix) -> Tensor:
        return self.inner.values(matrix)


class VocabularyParallel(LinearMethod):
    """A rank's rows of the embedding, the output matrix, or both."""

    def __init__(self, inner: LinearMethod, held: range, communicator: Communicator):
        self.inner, self.held, self.communicator = inner, held, communicator

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """[N] -> [N, d]. One rank has the row and the others add zeros, which is exact."""
        own = ids - self.held.start
        mine = (own >= 0) & (own < len(self.held))
        if not self.held:
            dtype = self.inner.lookup(matrix, ids[:0]).dtype
            rows = torch.zeros(len(ids), matrix.in_features, dtype=dtype, device=ids.device)
            return self.communicator.sum(rows)
        rows = self.inner.lookup(matrix, own.clamp(0, len(self.held) - 1))
        return self.communicator.sum(rows.masked_fill(~mine[:, None], 0.0))

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """Logits of this rank's tokens: [K, d] -> [K, V / n]"""
        return self.inner.apply(matrix, x, bias) if self.held else x.new_empty(len(x), 0)

    def values(self, matrix: Matrix) -> Tensor:
        return self.inner.values(matrix)


class SummedMoE(nn.Module):
    """A layer whose experts or expert units are split: one sum of routed and shared parts."""

    def __init__(self, moe: MoE, communicator: Communicator):
        super().__init__()
        self.moe, self.communicator = moe, communicator

    def forward(self, x: Tensor) -> Tensor:
        """[N, d] -> [N, d]"""
        return self.communicator.sum(self.moe(x).contiguous())


def connect(
    model: Decoder, whole: ModelConfig, communicator: Communicator, num_slots: int = 0
) -> None:
    """Add the communication to a rank's loaded and packed model. `num_slots` counts the slots of
    whole experts of all ranks; 0 where each rank has a share of every expert."""
    split = Split(communicator.rank, communicator.size)
    layers: list[Any] = list(model.layers)
    for layer in layers:
        summed = [layer.attention.o_proj]
        if isinstance(layer.mlp, MoE):
            if layer.mlp.shared is not None and communicator.rank > 0:
                layer.mlp.shared.down_proj.bias = None  # one rank adds it to the sum
            if num_slots:
                model.all_layers = None  # C has no whole experts of a part of a layer
                own = OwnExperts(layer.mlp.experts, split.share(num_slots))
                layer.mlp.experts = own  # type: ignore[assignment]
            layer.mlp = SummedMoE(layer.mlp, communicator)
        else:
            summed.append(layer.mlp.down_proj)
        for matrix in summed:
            matrix.method = RowParallel(matrix.method, communicator)
    for matrix in vocabulary_matrices(model):
        held = split.vocabulary(whole.vocab_size)
        matrix.method = VocabularyParallel(matrix.method, held, communicator)
    if isinstance(model.all_layers, AllLayers):
        model.all_layers.add_up(communicator.sum, owns_biases=communicator.rank == 0)
