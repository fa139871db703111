"""Small decoders with weights in panels, and steps over their caches: for all that is compared with
a decoder layer by layer, or with float64."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from minillm.cache.spec import cache_spec
from minillm.config import ModelConfig, RopeConfig
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.models.packing import pack_weights
from minillm.ops import cpu
from minillm.ops.batch import Batch

BF16, F32 = torch.bfloat16, torch.float32
BASE = ModelConfig(
    family="llama",
    vocab_size=96,
    hidden_size=64,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    max_position_embeddings=256,
    rms_norm_eps=1e-3,
)
CONFIGS = {
    "llama": BASE,
    "tied": replace(BASE, tie_word_embeddings=True),
    "mistral, with a window": replace(BASE, family="mistral", sliding_windows=(20, 20, 20)),
    "a window in some layers": replace(BASE, sliding_windows=(None, 7, None)),
    "qwen2, with biases": replace(BASE, family="qwen2", qkv_bias=True),
    "biases everywhere": replace(BASE, qkv_bias=True, output_bias=True, mlp_bias=True),
    "qwen3, with norms of heads": replace(BASE, family="qwen3", qk_norm=True, head_dim=32),
    "a wide MLP": replace(BASE, intermediate_size=320),
    "wide heads": replace(BASE, head_dim=96, num_heads=6, num_kv_heads=1),
    "interleaved": replace(BASE, rope=RopeConfig(interleaved=True)),
}
BLOCK, NUM_BLOCKS = 4, 60

TOLERANCE = {BF16: 0.03, F32: 2e-5}  # of a norm, against float64


def unpacked(config: ModelConfig, dtype: torch.dtype, seed: int = 0) -> Decoder:
    """A model in which every parameter counts; its weights are numbers of bf16 in every type."""
    model = Decoder(config, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.3) if name.endswith("norm.weight") else (0.0, 0.15)
            drawn = torch.empty(parameter.shape, dtype=BF16)
            parameter.copy_(drawn.normal_(mean, std, generator=generator))
        for name, buffer in model.named_buffers():
            if name.endswith("router.bias"):
                buffer.copy_(torch.empty(buffer.shape).normal_(0.0, 0.3, generator=generator))
    return model


def build(config: ModelConfig, seed: int = 0, dtype: torch.dtype = BF16) -> Decoder:
    """The same with its weights in panels."""
    if cpu.functions(dtype) is None:
        pytest.skip(cpu.describe(dtype))
    model = unpacked(config, dtype, seed)
    pack_weights(model)
    return model


def new_cache(model: Decoder) -> KVCache:
    """A cache full of NaN: what is read before it is written shows."""
    dtype = model.norm.weight.dtype
    kv = KVCache(cache_spec(model.config), model.config.num_layers, NUM_BLOCKS, BLOCK, dtype)
    kv.key.fill_(float("nan"))
    kv.value.fill_(float("nan"))
    return kv


@dataclass
class Sequence:
    """Tokens, of which some are computed, and blocks for all."""

    ids: Tensor
    blocks: Tensor
    done: int = 0


def sequences(lengths: list[int], seed: int = 0) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    order, made = torch.randperm(NUM_BLOCKS, generator=generator), []
    for length in lengths:
        count = -(-length // BLOCK)
        ids = torch.randint(96, (length,), generator=generator)
        made.append(Sequence(ids, order[:count]))
        order = order[count:]
    return made


def next_batch(rows: list[tuple[Sequence, int]], padding: int = 0, unmapped: int = 0) -> Batch:
    """The next tokens of some sequences; then padded rows of length 0, and rows of nobody."""
    ids, positions, slots, counts, lengths = [], [], [], [], []
    width = max(len(each.blocks) for each, _ in rows) + 1
    tables = torch.full((len(rows) + padding, width), 2**40)
    for row, (each, count) in enumerate(rows):
        at = torch.arange(each.done, each.done + count)
        ids.append(each.ids[at])
        positions.append(at)
        slots.append(each.blocks[at // BLOCK] * BLOCK + at % BLOCK)
        each.done += count
        counts.append(count)
        lengths.append(each.done)
        tables[row, : len(each.blocks)] = each.blocks
    zeros = torch.zeros(padding + unmapped, dtype=torch.int64)
    start = torch.tensor([0, *counts, *[1] * padding]).cumsum(0).int()
    return Batch(
        input_ids=torch.cat((*ids, zeros)),
        positions=torch.cat((*positions, zeros)),
        slot_mapping=torch.cat((*slots, zeros[:padding] - 1)),
        query_start=start,
        seq_lens=torch.tensor(lengths + [0] * padding, dtype=torch.int32),
        block_tables=tables,
        logits_indices=start[1:].long() - 1,
        max_query_len=max(counts),
    )


def steps(padded: bool = True) -> list[Batch]:
    """Whole prompts, chunks, single tokens and all of them at once."""
    a, b, c = sequences([60, 41, 50])
    made = [next_batch([(a, 33), (b, 7)]), next_batch([(a, 1), (b, 1)])]
    made.append(next_batch([(a, 1), (b, 20), (c, 3)], unmapped=2 if padded else 0))
    made.append(next_batch([(a, 1), (b, 1), (c, 1)], padding=3 if padded else 0))
    made.append(next_batch([(a, 1), (b, 5), (c, 40)], padding=1 if padded else 0))
    return [*made, *(next_batch([(a, 1), (b, 1), (c, 1)]) for _ in range(3))]


@torch.inference_mode()
def forward(model: Decoder, batch: Batch, kv: KVCache, at_once: bool = True) -> Tensor:
    """Hidden states of the rows that belong to somebody."""
    kept = model.all_layers
    try:
        model.all_layers = kept if at_once else None
        return model(batch, kv)[: int(batch.query_start[-1])]
    finally:
        model.all_layers = kept


def bits(cache: Tensor) -> Tensor:
    """To compare NaN, too."""
    return cache.view(torch.int16 if cache.dtype == BF16 else torch.int32)


def exact_steps(config: ModelConfig) -> list[Tensor]:
    """Hidden states of all steps by plain torch in float64, with the same weights, unpacked."""
    exact = unpacked(config, torch.float64)
    kv = KVCache(cache_spec(config), config.num_layers, NUM_BLOCKS, BLOCK, torch.float64)
    return [forward(exact, batch, kv) for batch in steps(padded=False)]


def check_near(got: Tensor, exact: Tensor) -> None:
    error = (got.double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[got.dtype]
