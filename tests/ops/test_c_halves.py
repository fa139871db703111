"""Layers half by half, with something in between: what tensor parallelism asks of C."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from minillm.cache.spec import cache_spec
from minillm.layers.kv_cache import KVCache
from minillm.models.all_layers import layer_shape, layer_weights
from minillm.models.decoder import Decoder
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm.ops.cpu_layers import Layers, LayerWeights
from minillm.ops.cpu_quantized import MatrixParts
from tests.ops.small_decoders import (
    BASE,
    BLOCK,
    NUM_BLOCKS,
    bits,
    check_near,
    exact_steps,
    forward,
    new_cache,
    steps,
    unpacked,
)

pytestmark = pytest.mark.usefixtures("panels")


@torch.inference_mode()
def run(
    layers: Layers, model: Decoder, batch: Batch, reduce: Callable[[Tensor], object] | None = None
) -> tuple[Tensor, Tensor]:
    """What `AllLayers` does, with something done between the halves."""
    x, rope = model.embedding(batch.input_ids), model.rope(batch.positions)
    where = batch.slot_mapping, batch.query_start, batch.seq_lens, batch.block_tables
    return layers.run(x, rope, *where, batch.max_query_len, reduce)


def layers_of(model: Decoder, kv: KVCache) -> Layers:
    weights = [layer_weights(layer) for layer in model.layers]
    return Layers(weights, layer_shape(model), kv.key, kv.value)


def test_halves_are_the_outputs_of_attention_and_mlp(model):
    """Bit for bit, and one after the other they are the one call."""
    mine, theirs, one = new_cache(model), new_cache(model), new_cache(model)
    by_halves, at_once, seen = layers_of(model, mine), layers_of(model, one), []
    for layer in model.layers:
        for module in (layer.attention, layer.mlp):
            module.register_forward_hook(lambda module, given, output: seen.append(output.clone()))
    for batch in steps():
        count, halves = int(batch.query_start[-1]), []
        seen.clear()
        forward(model, batch, theirs)
        got = run(by_halves, model, batch, lambda x: halves.append(x.clone()))  # noqa: B023
        assert len(halves) == len(seen) == 2 * model.config.num_layers
        for half, output in zip(halves, seen, strict=True):
            assert torch.equal(half[:count], output[:count])
        for each, expected in zip(got, run(at_once, model, batch), strict=True):
            assert torch.equal(each[:count], expected[:count])
    for one_cache, other in ((mine.key, theirs.key), (mine.value, theirs.value)):
        assert torch.equal(bits(one_cache), bits(other))


def share(model: Decoder, rank: int, ranks: int) -> list[LayerWeights]:
    """A rank's layers: some of the heads and of the MLP, the output's biases on the first rank."""
    config, found = model.config, []
    sizes = [n * config.head_dim for n in (config.num_heads, *[config.num_kv_heads] * 2)]

    def rows(whole: Tensor | None, sizes: list[int]) -> Tensor | None:
        """A rank's part of each of the pieces that lie below each other."""
        if whole is None:
            return None
        return torch.cat([each.chunk(ranks)[rank] for each in whole.split(sizes)]).contiguous()

    def packed(weight: Tensor) -> MatrixParts:
        panels = torch.empty(cpu.panels_shape(*weight.shape), dtype=weight.dtype)
        cpu.pack_panels(weight, panels)
        return MatrixParts(panels)

    halves = [config.intermediate_size] * 2
    for layer in model.layers:
        whole = layer_weights(layer)
        changed = {
            "qkv": packed(rows(whole.qkv.panels, sizes)),
            "qkv_bias": rows(whole.qkv_bias, sizes),
            "o": packed(whole.o.panels.chunk(ranks, dim=1)[rank]),
            "gate_up": packed(rows(whole.gate_up.panels, halves)),
            "gate_up_bias": rows(whole.gate_up_bias, halves),
            "down": packed(whole.down.panels.chunk(ranks, dim=1)[rank]),
        }
        if rank > 0:
            changed |= {"o_bias": None, "down_bias": None}
        found.append(replace(whole, **changed))
    return found


class Sum:
    """An all-reduce among threads."""

    def __init__(self, ranks: int):
        self.parts: list[Tensor | None] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def __call__(self, rank: int, x: Tensor) -> None:
        self.parts[rank] = x
        self.barrier.wait()
        total = sum(self.parts[1:], self.parts[0])
        self.barrier.wait()
        x.copy_(total)


SHARED = replace(BASE, intermediate_size=192, num_heads=8, num_kv_heads=2)
SHARED_CONFIGS = {
    "llama": SHARED,
    "biases everywhere": replace(SHARED, qkv_bias=True, output_bias=True, mlp_bias=True),
    "norms of heads, a window": replace(
        SHARED, family="qwen3", qk_norm=True, sliding_windows=(None, 7, None)
    ),
}


@pytest.mark.parametrize("name", SHARED_CONFIGS)
def test_two_ranks_add_up_their_halves(name, dtype):
    """Each with half of the heads and half of the MLP: as near to float64 as one with all."""
    config = SHARED_CONFIGS[name]
    model, exact = unpacked(config, dtype), exact_steps(config)
    part = replace(config, num_heads=4, num_kv_heads=1, intermediate_size=96)
    shape = replace(layer_shape(model), heads=4, kv_heads=1, intermediate=96)
    found: list[list[Tensor]] = [[], []]
    add_up = Sum(2)

    @torch.inference_mode()
    def work(rank: int) -> None:
        spec = cache_spec(part), config.num_layers, NUM_BLOCKS, BLOCK, dtype
        kv = KVCache(*spec)
        layers = Layers(share(model, rank, 2), shape, kv.key, kv.value)
        for batch in steps(padded=False):
            x, residual = run(layers, model, batch, partial(add_up, rank))
            found[rank].append(model.norm.add(x, residual)[0])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, (0, 1)))
    for one, other, expected in zip(*found, exact, strict=True):
        assert torch.equal(one, other)
        check_near(one, expected)
