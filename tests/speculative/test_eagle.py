"""EAGLE: every draft is that of the published formulas in float64, whatever happened before.

The formula has no cache and no engine: a feature of another position or of a rejected draft, keys
of an earlier owner of a block or of a feature that was its own give other drafts. That drafts
change no token is in the cells of `tests/matrix` with drafts "eagle".
"""

import json
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM
from minillm.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from minillm.layers.kv_cache import KVCache
from minillm.models.all_layers import AllLayers
from minillm.models.forward_pass import Chunk, ForwardPass
from minillm.ops import cpu
from minillm.ops.batch import Batch
from tests.engine.small import make
from tests.matrix.cells import Cell, check
from tests.models.tiny import Tiny
from tests.pairs import some
from tests.speculative.eagled import EagleWatch, K, eagle_of, with_eagle, write_eagle
from tests.speculative.test_draft_model import (
    LONG,
    SAMPLED,
    Toggled,
    generate,
    params_of,
    record_chunks,
    run_history,
)


@pytest.fixture
def layer(folder: Path, tmp_path: Path) -> Path:
    """A layer for the small model."""
    return write_eagle(folder, tmp_path / "layer")


@pytest.fixture
def masked(folder: Path, tmp_path: Path) -> Path:
    """A layer that drafts in parallel."""
    return write_eagle(folder, tmp_path / "masked", parallel=True)


# Random layers are hardly ever right: only so do their drafts become tokens.
ACCEPTED = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.7] * K}
PROMPTS = [LONG[:9], LONG[20:21], LONG[40:60]]


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_those_of_the_formula(folder, layer, monkeypatch, how):
    params, llm = params_of(30, **how), with_eagle(folder, layer)
    watch = EagleWatch(llm, layer, monkeypatch)
    found = generate(llm, PROMPTS, params)
    assert found == generate(make(folder, max_model_len=128), PROMPTS, params)
    watch.assert_right(least=100)


def test_after_drafts_were_accepted(folder, layer, monkeypatch):
    llm = with_eagle(folder, layer, config=ACCEPTED)
    watch = EagleWatch(llm, layer, monkeypatch)
    generate(llm, PROMPTS, params_of(60, **SAMPLED))
    assert llm.engine.scheduler.counters.num_accepted_tokens > 50
    watch.assert_right(least=150)


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_in_parallel_are_those_of_the_formula_in_one_pass(folder, masked, monkeypatch, how):
    params, llm = params_of(30, **how), with_eagle(folder, masked)
    watch, layer, passes = EagleWatch(llm, masked, monkeypatch), eagle_of(llm).layer, []
    layer.register_forward_hook(lambda *_: passes.append(1))
    found = generate(llm, PROMPTS, params)
    assert found == generate(make(folder, max_model_len=128), PROMPTS, params)
    assert len(passes) <= llm.engine.scheduler.counters.num_steps
    watch.assert_right(least=100)


def test_of_a_layer_that_drafts_in_parallel(folder, masked, monkeypatch):
    """After accepted drafts, preemptions and prompts in chunks; with noise of its own."""
    test_in_any_history(folder, masked, monkeypatch, 0)
    test_after_drafts_were_accepted(folder, masked, monkeypatch)
    test_with_noise_of_its_own(folder, masked)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "olmo2", "mixtral"])
def test_of_other_layers(tmp_path, monkeypatch, family):
    """An output matrix of its own, latent attention, norms behind the layers, experts."""
    model = Tiny(family, {"num_hidden_layers": 4}).write(tmp_path / "model").folder
    layer = write_eagle(model, tmp_path / "layer")
    llm = with_eagle(model, layer, max_model_len=96)
    watch = EagleWatch(llm, layer, monkeypatch)
    if family == "llama" and cpu.functions(torch.float32) is not None:
        assert isinstance(llm.engine.runner.model.all_layers.inner, AllLayers)
    generate(llm, [[5, 6, 7], [8] * 20], params_of(20, **SAMPLED))
    watch.assert_right(least=70)


@pytest.mark.parametrize("path", ["deterministic", "enforce_eager"])
def test_where_c_does_not_run_all_layers(folder, layer, monkeypatch, path):
    """Sums of fixed order, and torch operations only."""
    llm = with_eagle(folder, layer, **{path: True})
    watch = EagleWatch(llm, layer, monkeypatch)
    generate(llm, [LONG[:9], LONG[40:60]], params_of(30, **SAMPLED))
    watch.assert_right(least=70)


@pytest.mark.parametrize("seed", some([0, 1], range(8)))
def test_in_any_history(folder, layer, monkeypatch, seed):
    """A starved pool, prefixes, forks, aborts, steps planned ahead, drafts in some steps."""
    choose = random.Random(seed)
    llm = with_eagle(
        folder, layer, num_gpu_blocks_override=40,
        swap_space=(0, 2**-12)[seed % 2], prefix_cache=choose.choice(("hash", "radix")),
        max_num_batched_tokens=choose.choice((16, 64)), max_num_seqs=8,
        async_scheduling=choose.random() < 0.5, config=ACCEPTED,
    )  # fmt: skip
    watch, engine = EagleWatch(llm, layer, monkeypatch), llm.engine
    engine.scheduler.drafts = Toggled(seed)
    ways = {"temperature": 0.0}, {"n": 3}, {}
    run_history(engine, choose, 30, 40, lambda i: {"seed": i} | choose.choice(ways))
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens > 0
    assert (counters.num_preemptions_swap, counters.num_preemptions_recompute)[1 - seed % 2] > 0
    watch.assert_right(least=150)


def test_positions_are_computed_once_and_accepted_drafts_again(folder, layer, monkeypatch):
    """Before it drafts, the layer computes what it has not from features of the target: the prompt,
    then the last token and the drafts before it that were accepted."""
    llm = with_eagle(folder, layer, config=ACCEPTED)
    steps = record_chunks(llm, monkeypatch)
    generate(llm, [LONG[:9]], params_of(40, temperature=0.0))
    spans = [(chunk.start, chunk.end) for (chunk,) in steps]
    assert spans[0] == (0, 10)
    assert all(end == start for (_, end), (start, _) in pairwise(spans))
    accepted = sum(end - start - 1 for start, end in spans[1:])
    assert 10 < accepted <= llm.engine.scheduler.counters.num_accepted_tokens


def test_a_pass_over_another_cache_stores_nothing(folder, layer):
    llm = with_eagle(folder, layer)
    eagle_of(llm).features.states.fill_(7)
    forward = llm.engine.forward_pass
    plain = make(folder, max_model_len=128).engine.forward_pass
    found = [each.model.logits(each.model(*batch_of(each))) for each in (forward, plain)]
    assert torch.equal(*found)
    assert bool((eagle_of(llm).features.states == 7).all())


def batch_of(forward: ForwardPass) -> tuple[Batch, KVCache]:
    """Some tokens, and a cache for them."""
    kv = forward.allocate(1, 16)
    return forward.batch([Chunk(0, 0, LONG[:12])], kv.block_size), kv


def test_with_noise_of_its_own(folder, layer):
    """Each draft comes with the distribution that it was drawn from."""
    llm = with_eagle(folder, layer, config={"rejection_sample_method": "standard"})
    generate(llm, [LONG[:9], LONG[20:23]], params_of(40, **SAMPLED))
    assert not eagle_of(llm).coupled
    assert llm.engine.scheduler.counters.num_accepted_tokens > 0


# ---- the embedded layer ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_layer_is_worth_it():
    """It changes no token of the embedded model, and is as often right as its card says."""
    config = {"method": "eagle", "model": "tiny-eagle", "num_speculative_tokens": K}
    counters = check(Cell("embedded"), config).engine.scheduler.counters
    assert counters.num_accepted_at[0] > 0.3 * counters.num_drafts > 0


# ---- what is refused ---------------------------------------------------------------------------

REFUSALS = ConfigError, CheckpointError, UnsupportedFeatureError
TWO = {"distributed_executor_backend": "threads"}
DEPTHS = r"they must be increasing numbers of layers, from 1 to 2, the layers of this target"
# What is wrong: a field of heads.json, the drafts, an argument, a tensor or a file; the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": ({"layer": "tiny-eagles"}, "has no heads.json; .* 'minillm train eagle' wrote"),
    "heads": ({"layer": "tiny-medusa"}, "has heads of method 'medusa', not 'eagle'"),
    "of another": ({"base_hash": "1234"}, "was trained for the weights of .* with hash '1234', .*"
                   "train heads for this model with 'minillm train eagle'"),
    "no hash": ({"base_hash": ""}, "with hash '', and those of .* have '"),
    "deeper": ({"depths": [1, 3]}, r"has depths \[1, 3\]; " + DEPTHS),
    "embedding": ({"depths": [0, 2]}, r"has depths \[0, 2\]; " + DEPTHS),
    "order": ({"depths": [2, 1]}, r"has depths \[2, 1\]; " + DEPTHS),
    "twice": ({"depths": [2, 2]}, DEPTHS),
    "none": ({"depths": []}, DEPTHS),
    "a number": ({"depths": 2}, "has depths 2; " + DEPTHS),
    "text": ({"depths": ["1", "2"]}, DEPTHS),
    "true": ({"depths": [True, 2]}, DEPTHS),
    "one depth": ({"depths": [2]}, r"has fc.weight of shape \(32, 64\), and .* gives \(32, 32\)"),
    "no tensor": ({"without": "norm.weight"}, r"has norm.weight of shape None, and .* gives \(32,"),
    "random weights": ({"load_format": "dummy"}, "random weights have no trained heads; leave out"),
    "tensor ranks": (TWO | {"tensor_parallel_size": 2}, "one process and this engine has 2 ranks"),
    "stages": (TWO | {"pipeline_parallel_size": 2}, "drafting needs tokens that are still in the"),
    "parallel": ({"parallel": 1}, "has parallel 1; it must be true or false"),
    "masks": ({"parallel": True}, r"has mask.weight of shape None, and .* gives \(2, 32\)"),
    "half a file": ({"cut": -9}, "cannot be loaded: .* is not a whole safetensors"),
    "context": ({"config": {"max_model_len": 64}}, "is the context of a draft model; leave it"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_layer_for_this_engine(folder, layer, name):
    wrong, message = REFUSED[name]
    given, card = {"layer": layer} | wrong, json.loads((layer / "heads.json").read_text())
    card |= {key: given.pop(key) for key in [*card, "parallel"] if key in given}
    (layer / "heads.json").write_text(json.dumps(card))
    weights = layer / "model.safetensors"
    if missing := given.pop("without", None):
        save_file({k: v for k, v in load_file(weights).items() if k != missing}, weights)
    if cut := given.pop("cut", None):
        weights.write_bytes(weights.read_bytes()[:cut])
    refused(message, folder, **given)


def refused(message: str, *arguments: Any, **fields: Any) -> None:
    """In one line."""
    with pytest.raises(REFUSALS, match=message) as error:
        with_eagle(*arguments, **fields)
    assert "\n" not in str(error.value)


def test_a_layer_of_another_model(folder, tmp_path):
    """One weight more or less is another model."""
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    layer = write_eagle(other, tmp_path / "layer")
    refused("was trained for the weights of .*other' with hash", folder, layer)
    with_eagle(other, layer)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_allocated_is_what_was_planned(tmp_path, dtype):
    layer = write_eagle(Path("tiny"), tmp_path / "layer")
    config = {"method": "eagle", "model": str(layer), "num_speculative_tokens": 4}
    llm = LLM("tiny", dtype=dtype, speculative_config=config, kv_cache_memory_bytes=3_000_000,
              max_model_len=256, swap_space=2**-9)  # fmt: skip
    plan, sizes, runner = llm.plan(), llm.engine.allocated(), llm.engine.runner
    assert sizes["draft_weights"] == plan.draft_weight_bytes
    assert sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.draft_block_bytes
    assert sizes["kv_cache"] + sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.block_bytes
    assert sizes["draft_swap_space"] == runner.host.num_blocks * plan.draft_block_bytes
    assert eagle_of(llm).features.states.dtype == getattr(torch, dtype)
