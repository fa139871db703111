"""All layers in one call of C against the same decoder layer by layer.

Both use the same functions for the same rows, so their bits are the same. Layer by layer is
compared with transformers, and each function with float64, in other tests. Weights are in panels
here on every processor, as `MINILLM_PANELS=1` has it.
"""

import gc
import subprocess
import weakref
from concurrent.futures import ThreadPoolExecutor
from ctypes import sizeof
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minillm.cache.spec import cache_spec
from minillm.layers.kv_cache import KVCache
from minillm.models.all_layers import AllLayers
from minillm.models.decoder import Decoder
from minillm.models.fixed_sums import is_dense
from minillm.ops import c_library, cpu, cpu_layers
from minillm.ops.cpu_experts import ExpertShape, ExpertWeights
from minillm.ops.cpu_int8_cache import Int8Pages
from minillm.ops.cpu_latent import LatentShape, LatentWeights
from minillm.ops.cpu_layers import Layers, LayerShape, LayerWeights
from minillm.ops.cpu_quantized import MatrixParts
from minillm.ops.cpu_structures import structure_of
from minillm.ops.cpu_tails import TailsInC
from tests.ops.c_variants import ELEMENTS, built, parameters, use
from tests.ops.small_decoders import (
    BASE,
    BF16,
    BLOCK,
    CONFIGS,
    F32,
    NUM_BLOCKS,
    bits,
    build,
    check_near,
    exact_steps,
    forward,
    new_cache,
    steps,
)
from tests.ops.sparse_decoders import LATENT, QWEN

pytestmark = pytest.mark.usefixtures("panels")


@pytest.fixture
def llama() -> Decoder:
    return build(BASE, dtype=BF16 if cpu.functions(BF16) is not None else F32)


class Spy:
    """`AllLayers` of a model, which counts how often it did the work."""

    def __init__(self, model: Decoder):
        assert isinstance(model.all_layers, AllLayers)
        self.inner, self.answers = model.all_layers, []
        model.all_layers = self

    def takes(self, kv, x):
        self.answers.append(self.inner.takes(kv, x))
        return self.answers[-1]

    def __call__(self, *arguments):
        return self.inner(*arguments)


def test_one_call_is_the_layers_one_by_one(model):
    spy, mine, theirs = Spy(model), new_cache(model), new_cache(model)
    for batch in steps():
        got, expected = forward(model, batch, mine), forward(model, batch, theirs, at_once=False)
        assert torch.equal(got, expected)
        assert not got[: int(batch.query_start[len(batch.seq_lens.nonzero())])].isnan().any()
        for one, other in ((mine.key, theirs.key), (mine.value, theirs.value)):
            assert torch.equal(bits(one), bits(other))
    assert spy.answers == [True] * len(steps())


def test_one_call_is_near_to_float64(model):
    """Nothing is left out on both paths alike."""
    kv = new_cache(model)
    for batch, exact in zip(steps(padded=False), exact_steps(model.config), strict=True):
        check_near(forward(model, batch, kv), exact)


BUILDS = [("tiles in C", "BF16"), ("no tiles", "BF16"), ("no pairs", "BF16"), ("AVX2", "BF16")]
BUILDS += [("AVX2", "F32"), ("baseline", "F32")]


@pytest.mark.parametrize("variant", parameters(*BUILDS))
def test_every_kind_of_processor(variant, monkeypatch):
    """Products, attention and all else as compiled for it."""
    path, element = variant
    use(monkeypatch, built(path, element), ELEMENTS[element])
    for name in ("biases everywhere", "qwen3, with norms of heads"):
        model = build(CONFIGS[name], dtype=ELEMENTS[element])
        test_one_call_is_the_layers_one_by_one(model)
        test_one_call_is_near_to_float64(model)


def test_two_caches_in_turn(llama):
    spy, caches = Spy(llama), [new_cache(llama) for _ in range(3)]
    for batch in steps():
        expected = forward(llama, batch, caches[2], at_once=False)
        for kv in caches[:2]:
            assert torch.equal(forward(llama, batch, kv), expected)
    assert torch.equal(bits(caches[0].key), bits(caches[2].key))
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
    dtype = llama.norm.weight.dtype
    aside(llama, KVCache(spec, 3, NUM_BLOCKS, BLOCK, dtype, mode="invariant"))


def test_sizes_that_are_not_whole_vectors_are_not_taken():
    """head_dim 8, as in the embedded models, and 24."""
    for head_dim in (8, 24):
        model = build(replace(BASE, head_dim=head_dim, num_heads=8, num_kv_heads=4))
        assert model.all_layers is None
    shape = LayerShape(64, 4, 2, 16, 96, False, 1e-5, 1e-5, 0.25)
    assert shape.fits
    assert not replace(shape, head_dim=528).fits
    with pytest.raises(ValueError, match="check `fits` first"):
        Layers([], replace(shape, head_dim=8), torch.empty(0), torch.empty(0))


# ---- errors, memory, threads ---------------------------------------------------------------------


@pytest.mark.parametrize("config", [BASE, QWEN, LATENT], ids=["dense", "experts", "latent"])
@pytest.mark.parametrize("name", ["slot_mapping", "block_tables", "query_start", "seq_lens"])
def test_what_points_outside_the_cache_is_an_error(name, config, dtype):
    model = build(config, dtype=dtype)
    for value in (2**31 - 1, -5):
        if name == "slot_mapping" and value < 0:
            continue  # not cached
        batch = steps()[0]
        getattr(batch, name).view(-1)[0] = value
        with pytest.raises(IndexError, match="outside the cache"):
            forward(model, batch, new_cache(model))


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

    def work(i: int) -> bool:
        equal = True
        for _ in range(5):
            kv = new_cache(models[i])
            for batch, want in zip(steps(), expected[i], strict=True):
                equal &= torch.equal(forward(models[i], batch, kv), want)
        return equal

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [True, True]


@pytest.mark.parametrize("part", ["", "attention", "mlp"])
def test_a_layer_of_another_kind_is_left_to_python(llama, part):
    """A subclass computes something else."""
    assert AllLayers.of(llama) is not None
    changed = getattr(llama.layers[1], part) if part else llama.layers[1]
    changed.__class__ = type("Other", (type(changed),), {})
    assert AllLayers.of(llama) is None
    assert not all(map(is_dense, llama.layers))


STRUCTURES = {
    "layer": structure_of(LayerWeights), "shape": cpu_layers._Shape, "step": cpu_layers._Step,
    "matrix": structure_of(MatrixParts), "int8_pages": structure_of(Int8Pages),
    "latent_weights": structure_of(LatentWeights), "latent_shape": structure_of(LatentShape),
    "expert_weights": structure_of(ExpertWeights), "expert_shape": structure_of(ExpertShape),
    "batch_tails": structure_of(TailsInC),
}  # fmt: skip


def test_structures_have_the_sizes_and_offsets_of_c(tmp_path):
    checks = [
        f'_Static_assert(offsetof({kind}, {name}) == {getattr(found, name).offset}, "{name}");'
        for kind, found in STRUCTURES.items()
        for name, *_ in found._fields_
    ]
    checks += [f'_Static_assert(sizeof({k}) == {sizeof(v)}, "");' for k, v in STRUCTURES.items()]
    source = tmp_path / "offsets.c"
    source.write_text("\n".join(["#include <stddef.h>", '#include "layers.h"', *checks]))
    command = c_library.find_compiler(), "-DELEMENT_F32", *c_library.FLAGS, f"-I{c_library.SOURCES}"
    subprocess.run([*command, "-fsyntax-only", source], check=True)
