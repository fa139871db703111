"""All layers in one call of C against the same decoder layer by layer.

Both use the same functions for the same rows, so their bits are the same. Layer by layer is
compared with transformers, and each function with float64, in other tests.
"""

import gc
import threading
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.cache_spec import cache_spec
from minillm.config import ModelConfig, RopeConfig
from minillm.layers.kv_cache import KVCache
from minillm.models.all_layers import AllLayers
from minillm.models.decoder import Decoder
from minillm.models.packing import pack_weights
from minillm.ops import cpu
from minillm.ops.batch import Batch
from minillm.ops.cpu_layers import Layers, LayerShape

BF16 = torch.bfloat16
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

pytestmark = pytest.mark.skipif(
    not cpu.takes_panels(torch.zeros(32, 32, dtype=BF16)), reason="a processor without AMX"
)


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """A packed model in which every parameter counts."""
    model = Decoder(config, BF16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.3) if name.endswith("norm.weight") else (0.0, 0.15)
            parameter.normal_(mean, std, generator=generator)
    pack_weights(model)
    return model


@pytest.fixture(params=CONFIGS)
def model(request) -> Decoder:
    return build(CONFIGS[request.param])


@pytest.fixture
def llama() -> Decoder:
    return build(BASE)


def new_cache(model: Decoder) -> KVCache:
    """A cache full of NaN: what is read before it is written shows."""
    kv = KVCache(cache_spec(model.config), model.config.num_layers, NUM_BLOCKS, BLOCK, BF16)
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


class Spy:
    """`AllLayers` of a model, which counts how often it did the work."""

    def __init__(self, model: Decoder):
        assert isinstance(model.all_layers, AllLayers)
        self.inner, self.answers = model.all_layers, []
        model.all_layers = self

    def __call__(self, *arguments):
        result = self.inner(*arguments)
        self.answers.append(result is not None)
        return result


@torch.inference_mode()
def forward(model: Decoder, batch: Batch, kv: KVCache, at_once: bool = True) -> Tensor:
    """Hidden states of the rows that belong to somebody."""
    kept = model.all_layers
    try:
        model.all_layers = kept if at_once else None
        return model(batch, kv)[: int(batch.query_start[-1])]
    finally:
        model.all_layers = kept


def test_one_call_is_the_layers_one_by_one(model):
    spy, mine, theirs = Spy(model), new_cache(model), new_cache(model)
    for batch in steps():
        got, expected = forward(model, batch, mine), forward(model, batch, theirs, at_once=False)
        assert torch.equal(got, expected)
        assert not got[: int(batch.query_start[len(batch.seq_lens.nonzero())])].isnan().any()
        for one, other in ((mine.key, theirs.key), (mine.value, theirs.value)):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert spy.answers == [True] * len(steps())


def test_one_call_is_near_to_float32(model):
    """The same weights in float32, unpacked: nothing is left out on both paths alike."""
    plain = Decoder(model.config, torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            mean, std = (1.0, 0.3) if name.endswith("norm.weight") else (0.0, 0.15)
            drawn = torch.empty(parameter.shape, dtype=BF16)
            parameter.copy_(drawn.normal_(mean, std, generator=generator))
    kv, shape = new_cache(model), (model.config.num_layers, NUM_BLOCKS, BLOCK, torch.float32)
    exact = KVCache(cache_spec(model.config), *shape)
    for batch in steps(padded=False):
        got, expected = forward(model, batch, kv).float(), forward(plain, batch, exact)
        error = (got - expected).norm() / expected.norm()
        assert error < 0.03


def test_two_caches_in_turn(llama):
    spy, caches = Spy(llama), [new_cache(llama) for _ in range(3)]
    for batch in steps():
        expected = forward(llama, batch, caches[2], at_once=False)
        for kv in caches[:2]:
            assert torch.equal(forward(llama, batch, kv), expected)
    assert torch.equal(caches[0].key.view(torch.int16), caches[2].key.view(torch.int16))
    assert all(spy.answers)


def test_an_odd_layout_of_the_table(llama):
    """Columns of a transposed table, and rows of a wider one."""
    batch = steps()[0]
    expected = forward(llama, batch, new_cache(llama), at_once=False)
    for tables in (batch.block_tables.T.contiguous().T, batch.block_tables.repeat(1, 2)[:, :16]):
        other = replace(batch, block_tables=tables)
        assert torch.equal(forward(llama, other, new_cache(llama)), expected)


# ---- when it steps aside -------------------------------------------------------------------------


def aside(model: Decoder, kv: KVCache | None = None) -> None:
    """One pass in which C is not asked for all layers, and after which it is again."""
    spy, batch = Spy(model), steps()[0]
    assert torch.isfinite(forward(model, batch, kv or new_cache(model))).all()
    assert spy.answers == [False]
    model.all_layers = spy.inner


@pytest.mark.parametrize("name", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_see_every_layer(llama, name):
    seen: list[torch.nn.Module] = []
    watched = llama.layers[1].attention.o_proj
    hook = getattr(watched, name)(lambda module, *_: seen.append(module))
    aside(llama)
    assert seen == [watched]
    hook.remove()
    spy = Spy(llama)
    forward(llama, steps()[0], new_cache(llama))
    assert spy.answers == [True]


def test_hooks_for_all_modules_see_every_layer(llama):
    seen: list[torch.nn.Module] = []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        aside(llama)
    finally:
        hook.remove()
    assert llama.layers[1].mlp in seen


def test_watched_operations_are_torch_s(llama):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Watch():
        aside(llama)


def test_another_attention_is_asked(llama):
    spec = cache_spec(BASE)
    aside(llama, KVCache(spec, 3, NUM_BLOCKS, BLOCK, BF16, mode="invariant"))


def test_sizes_that_are_not_whole_vectors_are_not_taken():
    """head_dim 8, as in the embedded models, and 24."""
    for head_dim in (8, 24):
        model = build(replace(BASE, head_dim=head_dim, num_heads=8, num_kv_heads=4))
        assert model.all_layers is None
    shape = LayerShape(64, 4, 2, 16, 96, False, 1e-5, 1e-5, 0.25)
    assert shape.fits
    assert not replace(shape, head_dim=528).fits
    with pytest.raises(ValueError, match="ask `fits` first"):
        Layers([], replace(shape, head_dim=8), torch.empty(0), torch.empty(0))


def test_an_inner_size_that_no_tile_has_is_not_taken():
    assert build(replace(BASE, intermediate_size=80)).all_layers is None


# ---- errors, memory, threads ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["slot_mapping", "block_tables", "query_start", "seq_lens"])
def test_what_points_outside_the_cache_is_an_error(llama, name):
    for value in (2**31 - 1, -5):
        if name == "slot_mapping" and value < 0:
            continue  # not cached
        batch = steps()[0]
        getattr(batch, name).view(-1)[0] = value
        with pytest.raises(IndexError, match="outside the cache"):
            forward(llama, batch, new_cache(llama))


@pytest.mark.parametrize("name", ["slot_mapping", "block_tables", "query_start", "seq_lens"])
def test_what_c_would_read_wrongly_is_an_error(llama, name):
    batch = steps()[0]
    wrong = replace(batch, **{name: getattr(batch, name).float()})
    with pytest.raises(ValueError, match=f"{name} is .* it must be"):
        forward(llama, wrong, new_cache(llama))


def test_a_model_and_its_cache_are_given_back():
    model = build(BASE)
    kv = new_cache(model)
    forward(model, steps()[0], kv)
    memory = [weakref.ref(each) for each in (kv.key, model.layers[0].mlp.down_proj.weight)]
    gc.disable()  # reference counts alone must do
    try:
        del model, kv
        assert [each() for each in memory] == [None, None]
    finally:
        gc.enable()


def test_two_models_in_two_threads():
    models = [build(BASE, seed) for seed in (0, 1)]
    expected = [
        [forward(each, batch, kv, at_once=False).clone() for batch in steps()]
        for each in models
        for kv in [new_cache(each)]
    ]
    found: dict[int, bool] = {}

    def work(i: int) -> None:
        equal = True
        for _ in range(5):
            kv = new_cache(models[i])
            for batch, want in zip(steps(), expected[i], strict=True):
                equal &= torch.equal(forward(models[i], batch, kv), want)
        found[i] = equal

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: True, 1: True}


def test_the_number_of_threads_may_change_between_steps(llama):
    kv, other, before = new_cache(llama), new_cache(llama), torch.get_num_threads()
    try:
        for i, batch in enumerate(steps()):
            expected = forward(llama, batch, other, at_once=False)
            torch.set_num_threads(1 + i % 3)
            assert torch.equal(forward(llama, batch, kv), expected)
    finally:
        torch.set_num_threads(before)
