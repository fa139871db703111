"""Pairs of operations between which channels can be scaled without a change of the model.

A producer's output j is divided by s_j, and column j of all matrices that read it is multiplied:

| producer | readers | method |
|---|---|---|
| norm before attention | q, k, v (MLA: the down projections) | AWQ, SmoothQuant |
| norm before the MLP | gate and up of all experts, router, shared expert | AWQ, SmoothQuant |
| up | down: silu(gate) * up is linear in up, not in gate | AWQ |
| v | o, if every query head has its own v (no GQA, no MLA) | AWQ |
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from minillm.lab.quantise.calibration import Recorded
from minillm.lab.quantise.statistics import InputStatistics
from minillm.layers.attention import Attention
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import Matrix
from minillm.layers.mla import MLAttention
from minillm.layers.mlp import MLP
from minillm.layers.moe import MoE
from minillm.models.decoder import Block, DecoderLayer

ScalesOf = Callable[[Tensor, InputStatistics], Tensor]  # weight [rows, in] and inputs -> s [in]


@dataclass(frozen=True)
class Pair:
    """Tensors [d, ..] whose entries produce the d channels, the weights [rows, d] that read them,
    and the statistics of their inputs."""

    producer: tuple[Tensor, ...]
    readers: tuple[Tensor, ...]
    statistics: tuple[InputStatistics, ...]
    unrounded: tuple[Tensor, ...] = ()  # readers that stay in 16 bits

    def scale(self, scales_of: ScalesOf) -> None:
        """Scale the channels of this pair."""
        scales = scales_of(torch.cat(self.readers), joined(self.statistics))
        for tensor in self.producer:
            tensor /= scales.view(-1, *[1] * (tensor.ndim - 1))
        for tensor in (*self.readers, *self.unrounded):
            tensor *= scales
        for statistics in self.statistics:
            statistics.scale(scales)


def joined(parts: tuple[InputStatistics, ...]) -> InputStatistics:
    """The statistics of all inputs together; experts read the same channels."""
    if len(parts) == 1:
        return parts[0]
    total = InputStatistics(len(parts[0].total), parts[0].total.device)
    for part in parts:
        total.count += part.count
        total.products += part.products
        total.total += part.total
        total.largest = torch.maximum(total.largest, part.largest)
    return total


def scale_pairs(layer: Block, recorded: Recorded, scales_of: ScalesOf, only_norms: bool) -> None:
    """Scale the channels of all pairs of a layer, in place."""
    inner = () if only_norms else inner_pairs(layer, recorded)
    for pair in chain(norm_pairs(layer, recorded), inner):
        if joined(pair.statistics).count:
            pair.scale(scales_of)


def norm_pairs(layer: Block, recorded: Recorded) -> Iterator[Pair]:
    """The pairs that begin at a norm."""
    for norm, readers in norm_readers(layer):
        weights: list[Tensor] = []
        unrounded: list[Tensor] = []
        statistics: list[InputStatistics] = []
        for reader in readers:
            rows = reader.weight.data.flatten(0, -2)
            (weights if reader in recorded else unrounded).append(rows)
            statistics += recorded.get(reader, [])
        distinct = tuple(dict.fromkeys(statistics))
        yield Pair((norm,), tuple(weights), distinct, tuple(unrounded))


def norm_readers(layer: Block) -> Iterator[tuple[Tensor, list[Matrix]]]:
    """The weight of each norm, with all matrices that read its output; none of another block, whose
    norms may have other readers."""
    if type(layer) is not DecoderLayer:
        return
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, Attention):
        yield layer.input_norm.weight.data, [attention.qkv_proj]
    elif isinstance(attention, MLAttention):
        first: Matrix = attention.q_proj if attention.q_a_proj is None else attention.q_a_proj
        yield layer.input_norm.weight.data, [first, attention.kv_a_proj]
        if attention.q_a_norm is not None:
            yield attention.q_a_norm.weight.data, [attention.q_proj]
    if isinstance(mlp, MLP):
        yield layer.mlp_norm.weight.data, [mlp.gate_up_proj]
    elif isinstance(mlp, MoE):
        shared = [] if mlp.shared is None else [mlp.shared.gate_up_proj]
        yield layer.mlp_norm.weight.data, [mlp.experts.gate_up, *shared, mlp.router]


def inner_pairs(layer: Block, recorded: Recorded) -> Iterator[Pair]:
    """The pairs up -> down and v -> o."""
    attention, mlp = layer.attention, layer.mlp
    if isinstance(attention, Attention) and attention.num_heads == attention.num_kv_heads:
        size = attention.num_heads * attention.head_dim
        v = rows_of(attention.qkv_proj, -size)
        yield Pair(v, (attention.o_proj.weight.data,), tuple(recorded[attention.o_proj]))
    dense = mlp if isinstance(mlp, MLP) else mlp.shared if isinstance(mlp, MoE) else None
    if dense is not None:
        up = rows_of(dense.gate_up_proj, -dense.down_proj.in_features)
        yield Pair(up, (dense.down_proj.weight.data,), tuple(recorded[dense.down_proj]))
    if isinstance(mlp, MoE):
        size = mlp.experts.down.in_features
        for expert, statistics in enumerate(recorded[mlp.experts.down]):
            up = (mlp.experts.gate_up.weight.data[expert, -size:],)
            yield Pair(up, (mlp.experts.down.weight.data[expert],), (statistics,))


def rows_of(matrix: Linear, start: int) -> tuple[Tensor, ...]:
    """The rows of a matrix from `start`, and their bias if it has one."""
    bias = () if matrix.bias is None else (matrix.bias.data[start:],)
    return (matrix.weight.data[start:], *bias)
