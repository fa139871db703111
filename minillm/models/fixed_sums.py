"""Deterministic mode for dense models on a CPU: bitwise the same in any batch, on 1, 2, 4, 8 ranks.

The C functions compute every row, and every output of a product, independently. Their results do
not depend on the batch, nor on how many rows of a weight a rank holds. That leaves the row-parallel
products, whose inputs are split among ranks. Their sums have a fixed order:

    o, down    | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |   eight parts of the columns, for any n
    n = 2      |    rank 0     |    rank 1     |   each rank adds its own: (0 + 1) + (2 + 3)
    sum        ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))      one tree, in float32
    output     + bias, rounded once

A single rank adds the same eight parts. Prefill uses the decode attention kernel too, whose result
does not depend on the number of queries, nor on the number of heads of a rank.
"""

import logging
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from minillm.config import unknown_fields
from minillm.layers.attention import Attention
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import Matrix, PanelLinearMethod, PlainLinearMethod, finished
from minillm.layers.mlp import MLP
from minillm.models.decoder import Decoder, DecoderLayer
from minillm.models.deterministic import TiledDecoder
from minillm.models.packing import into_panels, list_matrices, packable
from minillm.ops import c_library, cpu, dispatch
from minillm.ops.batch import Batch
from minillm.ops.cpu_sums import MOST_PARTS, padded_part, panel_sums, with_zeros

logger = logging.getLogger(__name__)

PARTS = MOST_PARTS  # of the inputs of o_proj and down_proj


class FixedSumMethod(PanelLinearMethod):
    """A weight in panels. The product is summed over `parts` of the columns, which are then added
    as a tree in float32."""

    def __init__(self, out_features: int, parts: int):
        super().__init__(out_features)
        self.parts = parts

    def arranged(self, weight: Tensor) -> Tensor:
        """The weight with zeros appended to each part."""
        return with_zeros(weight, self.parts)

    def width(self, in_features: int) -> int:
        """Number of inputs including these zeros."""
        return padded_part(in_features, self.parts) * self.parts

    def partial(self, matrix: Matrix, x: Tensor) -> Tensor:
        """[N, in] -> float32 [N, out]"""
        return panel_sums(x, matrix.weight, self.out_features, self.parts)

    def apply(self, matrix: Matrix, x: Tensor, bias: Tensor | None) -> Tensor:
        return finished(self.partial(matrix, x), bias, x.dtype)

    def lookup(self, matrix: Matrix, ids: Tensor) -> Tensor:
        """Not supported: rows contain padding."""
        raise RuntimeError("FixedSumMethod does not support embedding lookup.")


class FixedDecoder(TiledDecoder):
    """A decoder whose operations compute every row independently, so it needs no tiles."""

    def __init__(self, model: Decoder):
        super().__init__(model, ())
        c = cpu.functions(model.dtype)
        group = model.config.num_heads // model.config.num_kv_heads
        self.most_queries = 1 if c is None else c.decode_queries(group)

    def forward(self, batch: Batch, kv: AttentionBackend) -> Tensor:
        return self.model(with_few_queries(batch, self.most_queries), kv)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


def with_few_queries(batch: Batch, most: int) -> Batch:
    """The same tokens as a batch with at most `most` queries per sequence. Longer queries are split
    into several sequences that share a block table."""
    if batch.max_query_len <= most:
        return batch
    ends = batch.seq_lens.tolist()
    runs = [
        (row, first, min(first + most, high), ends[row] - high)
        for row, (low, high) in enumerate(pairwise(batch.query_start.tolist()))
        for first in range(low, high, most)
    ]
    # The token at row r of the batch has position r + shift.
    seq_lens = [high + shift for _, _, high, shift in runs]
    starts = [runs[0][1], *(high for _, _, high, _ in runs)]
    return replace(
        batch,
        query_start=torch.tensor(starts, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=batch.block_tables[torch.tensor([row for row, *_ in runs])],
        max_query_len=most,
        on_host=(starts, seq_lens),
    )


def make_deterministic(model: Decoder, kv: KVCache) -> TiledDecoder:
    """Put a loaded model, or a rank's shard of one, in deterministic mode with this cache.

    A shard that needs tiles starts with tiles of one row: the ranks must agree on larger ones
    (`parallel/rank.py`).
    """
    obstacle = why_tiles(model)
    if obstacle:
        kv.mode = "invariant"
        tiled = TiledDecoder(model, (1,) if is_part(model) else None)
        tiled.obstacle = obstacle
        return tiled
    obstacle = fix_sums(model)
    fixed = FixedDecoder(model)
    fixed.obstacle = obstacle
    logger.info("Deterministic mode computes every row independently, without tiles.")
    return fixed


def why_tiles(model: Decoder) -> str:
    """Why a model needs tiles; empty if every row can be computed independently."""
    config = model.config
    if model.device.type != "cpu":
        return f"the model is on {model.device}"
    if dispatch.backend_of(model.device).name != "cpu":  # interpreted kernels, in tests
        return "our C functions are not used"
    if cpu.functions(model.dtype) is None or model.plain_torch or cpu.panels_setting() == "0":
        return "our C functions are not used"
    if unknown_fields(config) or not all(map(is_dense, model.layers)):
        return "only layers of grouped attention and dense MLP, each after a norm, have fixed sums"
    group = config.num_heads // config.num_kv_heads
    dim = config.head_dim
    if dim > cpu.MOST_HEAD_DIM or not cpu.fits_vectors(group, dim, dim):
        return f"heads of {dim} dimensions are not a multiple of {cpu.LANES}"
    if config.hidden_size % cpu.PANEL_STEP:
        return f"hidden size {config.hidden_size} is not a multiple of {cpu.PANEL_STEP}"
    if any(not isinstance(matrix.method, PlainLinearMethod) for matrix in list_matrices(model)):
        return "its weights are not plain numbers"
    return ""


def is_dense(layer: torch.nn.Module) -> bool:
    """Whether a layer is grouped-query attention and a dense MLP."""
    kinds = type(layer), type(getattr(layer, "attention", None)), type(getattr(layer, "mlp", None))
    return kinds == (DecoderLayer, Attention, MLP)  # a subclass computes something else


def is_part(model: Decoder) -> bool:
    """Whether a model is a rank's shard."""
    parts = [part for matrix in list_matrices(model) for part in matrix.parts]
    return any(part.shape != (len(part.rows), len(part.columns)) for part in parts)


@torch.inference_mode()
def fix_sums(model: Decoder) -> str:
    """Pack the weights of a model that needs no tiles. Returns why the result depends on the number
    of ranks, or an empty string."""
    summed: dict[Matrix, int] = {}
    for layer in model.layers:
        if isinstance(layer, DecoderLayer):
            rows = layer.attention.o_proj, layer.mlp.down_proj
            summed |= {module: num_parts(module) for module in rows if isinstance(module, Linear)}

    def method_of(layer: Matrix) -> PanelLinearMethod:
        if layer in summed:
            return FixedSumMethod(layer.out_features, summed[layer] or 1)
        return PanelLinearMethod(layer.out_features)

    into_panels(packable(model), method_of)
    c_library.return_freed_memory()
    uneven = sorted({part.shape[1] for each in summed if not summed[each] for part in each.parts})
    return f"{uneven[0]} inputs cannot be split into {PARTS} equal parts" if uneven else ""


def num_parts(matrix: Matrix) -> int:
    """How many of the eight parts this rank's columns are; 0 if they are not whole parts."""
    (part,) = matrix.parts
    size, rest = divmod(part.shape[1], PARTS)
    held, uneven = divmod(len(part.columns), max(size, 1))
    return 0 if rest or uneven or held not in (1, 2, 4, PARTS) else held
