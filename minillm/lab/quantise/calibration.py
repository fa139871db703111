"""Runs a calibration text through a model layer by layer, and records the inputs of matrices.

The activations of one layer are held at a time, float32 [tokens, d]. A layer sees the outputs of
the layers before it as they are then, so a later layer can compensate the errors of quantised ones.
"""

import torch
from torch import Tensor

from minillm import ops
from minillm.cache.spec import cache_spec
from minillm.lab.quantise.statistics import InputStatistics
from minillm.layers.kv_cache import KVCache
from minillm.layers.linear_methods import Matrix, PlainLinearMethod
from minillm.layers.mla import MLAttention
from minillm.layers.moe import Router
from minillm.models.decoder import Block, Decoder
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.ops.batch import Batch

WINDOWS_PER_BATCH = 8

Recorded = dict[Matrix, list[InputStatistics]]  # per matrix: one, or one for each expert


class Calibration:
    """The activations of a calibration text before some layer.

    Args:
        windows: token ids [W, T]; every window is a sequence.
    """

    def __init__(self, model: Decoder, windows: Tensor):
        self.model, length = model, windows.shape[1]
        count = min(WINDOWS_PER_BATCH, len(windows))
        config, device = model.config, model.device
        self.kv = KVCache(
            cache_spec(config), config.num_layers, count, length, torch.float32, device
        )
        run = ForwardPass(model)
        self.batches = [
            run.batch([Chunk(i, 0, row) for i, row in enumerate(rows.tolist())], length)
            for rows in windows.split(count)
        ]
        self.hidden = [model.embedding(batch.input_ids).float() for batch in self.batches]

    def record(self, layer: Block) -> Recorded:
        """Run a layer, and record the inputs of its matrices. The activations stay."""
        matrices = quantizable(layer)
        for matrix in matrices:
            matrix.method = RecordingMethod(matrix)
        for x, batch in zip(self.hidden, self.batches, strict=True):
            self._run(layer, x, batch)
        found = {m: m.method.statistics for m in matrices if isinstance(m.method, RecordingMethod)}
        for matrix in matrices:
            matrix.method = PlainLinearMethod()
        return found

    def advance(self, layer: Block) -> None:
        """Replace the activations by the outputs of a layer."""
        for index, batch in enumerate(self.batches):
            self.hidden[index] = self._run(layer, self.hidden[index], batch)

    def _run(self, layer: Block, x: Tensor, batch: Batch) -> Tensor:
        rope = self.model.rope(batch.positions, self.model.plain_torch)
        out, residual = layer(x, None, rope, batch, self.kv)
        return out + residual


class RecordingMethod(PlainLinearMethod):
    """An unquantised matrix that records its inputs."""

    def __init__(self, matrix: Matrix):
        size, device = matrix.in_features, matrix.weight.device
        self.statistics = [InputStatistics(size, device) for _ in range(matrix.copies or 1)]

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        """[N, in], [out] -> [N, out]"""
        self.statistics[0].add(x)
        return super().apply(matrix, x, bias)

    def experts(
        self, gate_up: Matrix, down: Matrix, x: Tensor, weights: Tensor, ids: Tensor, tiled: bool
    ) -> Tensor:
        """MoE layer as `LinearMethod.experts`; each expert records its own tokens."""
        recording = down.method
        out = torch.zeros_like(x)
        for expert, mine in enumerate(self.statistics):
            rows, place = (ids == expert).nonzero(as_tuple=True)
            mine.add(x[rows])
            inner = ops.silu_mul(x[rows] @ gate_up.weight[expert].T)
            if isinstance(recording, RecordingMethod):
                recording.statistics[expert].add(inner)
            result = (inner @ down.weight[expert].T) * weights[rows, place, None]
            out.index_add_(0, rows, result.to(out.dtype))
        return out


def quantizable(layer: Block) -> list[Matrix]:
    """The matrices of a layer that are quantised: all but routers, which are small and decide
    discretely, and the matrix that MLA absorbs."""
    absorbed = {id(each.kv_b_proj) for each in layer.modules() if isinstance(each, MLAttention)}
    return [
        one
        for one in layer.modules()
        if isinstance(one, Matrix) and not isinstance(one, Router) and id(one) not in absorbed
    ]


def layer_of(model: Decoder, index: int) -> Block:
    """A layer of a model."""
    layer = model.layers[index]
    if not isinstance(layer, Block):
        raise RuntimeError(f"Layer {index} has been freed.")
    return layer
