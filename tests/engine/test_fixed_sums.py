"""Which models need no tiles in deterministic mode, and how their batches and weights are cut."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from minillm.layers.kv_cache import KVCache
from minillm.layers.linear import Linear
from minillm.layers.linear_methods import Matrix, WeightSlice
from minillm.models.decoder import Decoder
from minillm.models.deterministic import TiledDecoder
from minillm.models.fixed_sums import (
    FixedDecoder,
    is_part,
    make_deterministic,
    num_parts,
    with_few_queries,
)
from minillm.models.presets import preset
from minillm.ops import cpu
from minillm.ops.batch import Batch

SMALL = replace(
    preset("smollm2-135m"), num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, hidden_size=64,
    intermediate_size=96, vocab_size=101,
)  # fmt: skip


def decoder(**fields: Any) -> Decoder:
    model = Decoder(replace(SMALL, **fields))
    model.initialize(0.1)
    return model


def cache(model: Decoder) -> KVCache:
    from minillm.cache.spec import cache_spec

    return KVCache(cache_spec(model.config), model.config.num_layers, 4, 8, model.dtype)


needs_c = pytest.mark.skipif(
    cpu.functions(torch.float32) is None, reason=cpu.describe(torch.float32)
)


@needs_c
def test_a_dense_model_needs_no_tiles():
    model = decoder()
    kv = cache(model)
    fixed = make_deterministic(model, kv)
    assert isinstance(fixed, FixedDecoder)
    assert (fixed.tiles, kv.mode, fixed.obstacle) == ((), "fast", "")


@needs_c
@pytest.mark.parametrize(
    ("fields", "why"),
    [({"head_dim": 24}, "heads of 24 dimensions"), ({"hidden_size": 80}, "hidden size 80")],
)
def test_sizes_that_c_does_not_take_need_tiles(fields, why):
    model = decoder(**fields)
    kv = cache(model)
    tiled = make_deterministic(model, kv)
    assert why in tiled.obstacle
    assert not isinstance(tiled, FixedDecoder)
    assert isinstance(tiled, TiledDecoder)
    assert tiled.tiles
    assert kv.mode == "invariant"


@needs_c
def test_inputs_that_8_does_not_divide_are_one_sum():
    model = decoder(intermediate_size=100)
    fixed = make_deterministic(model, cache(model))
    assert isinstance(fixed, FixedDecoder)
    assert "100 inputs cannot be split into 8 equal parts" in fixed.obstacle
    methods = [model.layers[0].attention.o_proj.method, model.layers[0].mlp.down_proj.method]
    assert [each.parts for each in methods] == [8, 1]


@pytest.mark.parametrize(
    ("whole", "held", "parts"),
    [(96, 96, 8), (96, 48, 4), (96, 24, 2), (96, 12, 1), (96, 32, 0), (100, 100, 0), (4, 4, 0)],
)
def test_parts(whole, held, parts):
    matrix = Matrix([WeightSlice("", (5, whole), range(5), range(held, 2 * held))])
    assert num_parts(matrix) == parts


def test_a_rank_s_model_is_a_part():
    model = decoder()
    assert not is_part(model)
    layer = model.layers[0].mlp.down_proj
    assert isinstance(layer, Linear)
    (part,) = layer.parts
    layer.parts = (WeightSlice(part.name, (part.shape[0], 192), part.rows, range(96, 192)),)
    assert is_part(model)


def test_runs_of_queries_become_short():
    """Sequences of 2, 7 and 1 queries behind 0, 3 and 5 tokens; the second one has three runs."""
    batch = Batch(
        input_ids=torch.arange(10),
        positions=torch.tensor([0, 1, *range(3, 10), 5]),
        slot_mapping=torch.arange(10),
        query_start=torch.tensor([0, 2, 9, 10], dtype=torch.int32),
        seq_lens=torch.tensor([2, 10, 6], dtype=torch.int32),
        block_tables=torch.tensor([[5], [6], [7]]),
        logits_indices=torch.tensor([1, 8, 9]),
        max_query_len=7,
    )
    short = with_few_queries(batch, 3)
    assert short.query_start.tolist() == [0, 2, 5, 8, 9, 10]
    assert short.seq_lens.tolist() == [2, 6, 9, 10, 6]
    assert short.block_tables.tolist() == [[5], [6], [6], [6], [7]]
    assert short.max_query_len == 3
    assert with_few_queries(batch, 7) is batch
