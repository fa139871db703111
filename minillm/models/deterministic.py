"""Deterministic mode (batch invariance): a request's output is bitwise the same in any batch, with
any prefill chunks, and after recomputation.

A matrix product splits its sums differently for different numbers of rows, and so rounds
differently (He et al., "Defeating Nondeterminism in LLM Inference", 2025). In this mode the model
runs on tiles with a fixed number of rows, padded at the end: the result of a row can then depend
only on its values and its index in the tile. A probe at engine start checks that it does not depend
on the index. Attention and experts have batch-invariant implementations: attention mode
"invariant" and `ops.tiled_moe_experts`.

Dense models on a CPU need no tiles, because the C functions compute each row independently
(`fixed_sums.py`).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod

import numpy as np
import torch
from torch import Tensor, nn

from minillm import ops
from minillm.cache.spec import cache_spec
from minillm.layers.kv_cache import AttentionBackend, KVCache
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import Matrix
from minillm.layers.mla import MLAttention
from minillm.layers.mlp import MLP
from minillm.layers.moe import Experts, Router
from minillm.models.decoder import Decoder
from minillm.ops.batch import Batch, Tails
from minillm.ops.transfers import upload

logger = logging.getLogger(__name__)

# Tiles of one row are the fallback: libraries use different kernels for one row. Milliseconds of a
# forward pass of SmolLM2-135M on two cores of a Xeon with AMX, and sizes with equal bits:
#     rows          1    8   16   32   64  128
#     float32      41   65   78   97  134  206    16 and 32
#     bfloat16     53   53   53   62   76  109    8 to 32
# So 16 costs a single decode little, and is compatible with a larger tile for prompts.
TILES = (8, 16, 32, 64, 128)
PREFERRED = 16
MOST_LOGITS = 64  # rows of logits computed at a time, to bound their memory
PASS_ROWS = 32  # one more pass costs about as much as this many more rows in a pass
PROBE_TOKENS = (2, 8)  # minimum and maximum length of the probe's sequence
PROBE_WEIGHTS = 2**26  # target for weights times tokens of the probe
PROBE_PRODUCT = 2**24  # largest weight whose product is probed separately


class TiledDecoder(nn.Module):
    """A decoder that runs the flat batch in tiles, each through the whole model.

    A tile writes its KV before the next one runs, so attention is unchanged. `tiles` are tile sizes
    with equal bits; the default is `find_tiles`. `obstacle` says why the result depends on the
    number of ranks, or is empty.
    """

    obstacle = ""

    def __init__(self, model: Decoder, tiles: Sequence[int] | None = None):
        super().__init__()
        self.model, self.config = model, model.config
        for layer in model.modules():
            if isinstance(layer, Experts):
                layer.tiled = True
            elif isinstance(layer, MLP):
                layer.activation = ops.invariant_silu_mul
        self.tiles: tuple[int, ...] = ()
        self.logits_tiles: tuple[int, ...] = ()
        self.use(find_tiles(model) if tiles is None else tiles)

    def use(self, tiles: Sequence[int]) -> None:
        """Set the tile sizes."""
        self.tiles = tuple(sorted(tiles))
        self.logits_tiles = tuple(size for size in self.tiles if size <= MOST_LOGITS)

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.model.device

    def forward(self, batch: Batch, kv: AttentionBackend) -> Tensor:
        """N tokens -> hidden states [N, d]"""
        return torch.cat([
            self.model(tile, kv)[: len(tile.slot_mapping)] for tile in cut(batch, self.tiles)
        ])  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """[K, d] -> [K, V]"""
        return torch.cat([
            self.model.logits(hidden[padded(start, stop, size, hidden.device)])[: stop - start]
            for start, stop, size in spans(len(hidden), self.logits_tiles)
        ])  # fmt: skip


def spans(num_rows: int, tiles: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut rows into tiles: (start, stop, size including padding) of each.

    The remainder uses the smallest tile that holds it, unless the padding would cost more than
    another pass.
    """
    start = 0
    while start < num_rows:
        rest = num_rows - start
        smaller = [size for size in tiles if size < rest]
        size = next((size for size in tiles if size >= rest), 0)
        if not size or (smaller and size > rest + PASS_ROWS):
            size = smaller[-1]
        stop = min(start + size, num_rows)
        yield start, stop, size
        start = stop


def padded(start: int, stop: int, size: int, device: torch.device) -> Tensor:
    """Row indices of a tile, padded by repeating the last row: zeros as padding could be routed to
    experts that no row needs."""
    return torch.arange(start, start + size, device=device).clamp_(max=stop - 1)


def cut(batch: Batch, tiles: Sequence[int]) -> Iterator[Batch]:
    """The tiles of a flat batch, as batches. `slot_mapping` excludes the padding."""
    on_host = batch.on_host or (batch.query_start.cpu(), batch.seq_lens.cpu())
    bounds, ends = (np.asarray(tensor).tolist() for tensor in on_host)
    device = batch.input_ids.device
    for start, stop, size in spans(len(batch.input_ids), tiles):
        rows = padded(start, stop, size, device)
        parts = [
            (sequence, max(low, start), min(high, stop), ends[sequence] - high)
            for sequence, (low, high) in enumerate(pairwise(bounds))
            if low < stop and high > start
        ]
        sequences = slice(parts[0][0], parts[-1][0] + 1)
        # The token at row r of the batch has position r + shift.
        seq_lens = [high + shift for _, _, high, shift in parts]
        starts = [0, *(high - start for _, _, high, _ in parts)]
        query_start, lengths = upload(
            device, np.array(starts, dtype=np.int32), np.array(seq_lens, dtype=np.int32)
        )
        yield replace(
            batch,
            input_ids=batch.input_ids[rows],
            positions=batch.positions[rows],
            slot_mapping=batch.slot_mapping[start:stop],
            query_start=query_start,
            seq_lens=lengths,
            block_tables=batch.block_tables[sequences],
            logits_indices=batch.logits_indices[:0],
            max_query_len=max(high - low for _, low, high, _ in parts),
            tails=batch.tails and Tails(*(tail[sequences] for tail in batch.tails)),
            on_host=(starts, seq_lens),
        )


# ---- the probe --------------------------------------------------------------------------------


@torch.inference_mode()
def find_tiles(model: Decoder, candidates: Sequence[int] = TILES) -> tuple[int, ...]:
    """Tile sizes that are batch-invariant on this machine, with this model and dtype.

    A size qualifies if equal rows give equal results at every index of the tile. Sizes can be mixed
    if their results are equal too. Returns `PREFERRED` and all sizes that agree with it; if it does
    not qualify, the next smaller size takes its place. Tiles of one row always qualify.
    """
    with torch.accelerator.device_index(model.device.index):
        results = {size: probe(model, size) for size in candidates}
    failed = [size for size, result in results.items() if result is None]
    right = {size: result for size, result in results.items() if result is not None}
    first = max((size for size in right if size <= PREFERRED), default=1)
    tiles = tuple(
        size for size, result in right.items() if first > 1 and torch.equal(result, right[first])
    ) or (1,)
    if failed:
        logger.warning(
            "Deterministic mode does not use tiles of %s rows: a row's result depends on its index "
            "in the tile.",
            " or ".join(map(str, failed)),
        )
    logger.info("Deterministic mode uses tiles of %s rows.", " or ".join(map(str, tiles)))
    return tiles


def probe(model: Decoder, size: int) -> Tensor | None:
    """Results of tiles of this size, as bytes; None if they depend on a row's index."""
    rows = [*model_outputs(model, size), *product_outputs(model, size)]
    if any(not same_bits(row, row[:1].expand_as(row)) for row in rows):
        return None
    return torch.cat([row[0].clone().view(torch.uint8).flatten() for row in rows])


def model_outputs(model: Decoder, size: int) -> Iterator[Tensor]:
    """Hidden states and logits of a short sequence, each token repeated `size` times in a tile."""
    device, config = model.device, model.config
    # Computed from the config, because ranks may hold unequal shares of the vocabulary and all
    # must run the same number of steps.
    num_weights = config.vocab_size * config.hidden_size
    num_weights += sum(parameter.numel() for parameter in model.layers.parameters())
    # A small model has fewer sums in which a difference could show, so it runs more tokens.
    count = max(PROBE_TOKENS[0], min(PROBE_TOKENS[1], PROBE_WEIGHTS // num_weights))
    spec = cache_spec(config)
    size_of_block = count if device.type == "cpu" else 16  # as the engine's: compiled once
    shape = config.num_layers, 1, size_of_block
    kv = FirstRow(spec, *shape, model.dtype, device, "invariant")
    for position in range(count):
        place = torch.tensor([position], device=device)
        token = (place + 1) * 7919 % config.vocab_size
        batch = Batch(
            input_ids=token.repeat(size),
            positions=place.repeat(size),
            slot_mapping=place,
            query_start=torch.tensor([0, 1], dtype=torch.int32, device=device),
            seq_lens=(place + 1).to(torch.int32),
            block_tables=torch.zeros(1, 1, dtype=torch.int64, device=device),
            logits_indices=place[:0],
            max_query_len=1,
        )
        hidden = model(batch, kv)
        yield hidden
        yield model.logits(hidden[:MOST_LOGITS])


class FirstRow(KVCache):
    """The KV cache of the probe. Attention kernels leave padding rows undefined, so the output of
    the only query row is copied to them: rows then differ only by the products that are probed."""

    def attend(
        self, layer: int, query: Tensor, batch: Batch, scale: float, window: int | None
    ) -> Tensor:
        """[N, H, D] -> [N, H, Dv], the first row repeated"""
        out = super().attend(layer, query, batch, scale, window)
        return out[:1].repeat(len(query), 1, 1)


def product_outputs(model: Decoder, size: int) -> Iterator[Tensor]:
    """Products of the model's shapes whose exact value is 0, so that the result is rounding error.

    In half precision, rounding the result hides most differences in the order of a sum; with a sum
    of 0 they all show. The largest matrices are skipped: they have enough sums for a difference to
    show in the model's output.
    """
    for shape, dtype in product_shapes(model):
        weight, x = cancelling(shape, dtype, model.device)
        if len(shape) == 2:
            layer = Linear("", shape[1], {"": shape[0]})
            layer.create(dtype, model.device)
            layer.values().copy_(weight)
            yield layer(x.repeat(size, 1))
        else:
            yield torch.einsum("nhd,hrd->nhr", x.repeat(size, 1, 1), weight)


def product_shapes(model: Decoder) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes [.., out, in] and dtypes of all matrices, and of MLA's products per head."""
    shapes: dict[tuple[tuple[int, ...], torch.dtype], None] = {}
    dtype = model.dtype
    for module in model.modules():
        if isinstance(module, Matrix):
            shapes[module.shape[-2:], torch.float32 if isinstance(module, Router) else dtype] = None
        if isinstance(module, MLAttention):
            rank, heads = module.mla.kv_lora_rank, module.num_heads
            shapes[(heads, rank, module.mla.qk_nope_head_dim), dtype] = None
            shapes[(heads, module.mla.v_head_dim, rank), dtype] = None
    return [key for key in shapes if prod(key[0]) <= PROBE_PRODUCT]


def cancelling(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """A weight [.., out, in] and one row [1, .., in] whose products cancel in pairs."""
    generator = torch.Generator().manual_seed(0)
    half, places = shape[-1] // 2, torch.randperm(shape[-1], generator=generator)
    weight, x = torch.zeros(shape), torch.zeros(1, *shape[:-2], shape[-1])
    values = torch.randn(*shape[:-1], half, generator=generator)
    factors = torch.randn(1, *shape[:-2], half, generator=generator)
    for sign, columns in ((1, places[:half]), (-1, places[half : 2 * half])):
        weight[..., columns], x[..., columns] = sign * values, factors
    return weight.to(device, dtype), x.to(device, dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Bitwise equality: NaN equals itself, and 0 differs from -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
