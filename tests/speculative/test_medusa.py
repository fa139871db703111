"""Medusa heads: every draft is that of the formula in float64, whatever happened to its sequence.

The hidden state that a draft is compared with is that of a pass over the text without an engine, so
a state of another row, of a rejected draft or of an earlier owner of a block gives other drafts.
That drafts change no token is in `tests/matrix`.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM
from minillm.errors import ConfigError
from minillm.models.checkpoint import open_model
from minillm.speculative.heads import base_hash
from tests.engine.small import assert_idle, make
from tests.matrix.cells import Cell, check
from tests.matrix.proposers import K
from tests.models.tiny import Tiny
from tests.pairs import some
from tests.speculative.headed import COUNT, Watch, medusa_of, with_heads, write_heads
from tests.speculative.test_draft_model import LONG, SAMPLED, Toggled, generate, params_of


@pytest.fixture
def heads(folder: Path, tmp_path: Path) -> Path:
    """Heads of the small model."""
    return write_heads(folder, tmp_path / "heads")


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_those_of_the_formula(folder, heads, monkeypatch, how):
    prompts = [LONG[:9], LONG[20:21], LONG[40:60]]
    params = params_of(30, **how)
    llm = with_heads(folder, heads)
    watch = Watch(llm, heads, monkeypatch)
    found = generate(llm, prompts, params)
    assert found == generate(make(folder, max_model_len=128), prompts, params)
    watch.assert_right(least=100)


def test_of_an_output_matrix_of_its_own(tmp_path, monkeypatch):
    model = Tiny("llama", {"num_hidden_layers": 2}).write(tmp_path / "model").folder
    heads = write_heads(model, tmp_path / "heads")
    llm = with_heads(model, heads, max_model_len=96)
    watch = Watch(llm, heads, monkeypatch)
    generate(llm, [[5, 6, 7], [8] * 20], params_of(30, **SAMPLED))
    watch.assert_right(least=100)


@pytest.mark.parametrize("seed", some([0, 1], range(8)))
def test_in_any_history(folder, heads, monkeypatch, seed):
    """A starved pool, prefixes, forks, aborts, steps planned ahead, drafts in some steps."""
    choose = random.Random(seed)
    llm = with_heads(
        folder, heads, num_gpu_blocks_override=40,
        swap_space=(0, 2**-12)[seed % 2], prefix_cache=choose.choice(("hash", "radix")),
        max_num_batched_tokens=choose.choice((16, 64)), max_num_seqs=8,
        async_scheduling=choose.random() < 0.5,
    )  # fmt: skip
    watch, engine = Watch(llm, heads, monkeypatch), llm.engine
    engine.scheduler.drafts = Toggled(seed)
    for i in range(16):
        start = choose.choice((0, 0, 50, 100))
        prompt = LONG[start : start + choose.randrange(1, 40)]
        how = choose.choice(({"temperature": 0.0}, {"n": 3, "seed": i}, {"seed": i}))
        params = params_of(choose.randrange(1, 40), **how)
        engine.add(engine.make_request(str(i), None, prompt, params))
        for _ in range(choose.randrange(6)):
            engine.step()
        if choose.random() < 0.2:
            engine.abort(str(choose.randrange(i + 1)))
    while engine.has_work:
        engine.step()
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens > 0
    assert (counters.num_preemptions_swap, counters.num_preemptions_recompute)[1 - seed % 2] > 0
    watch.assert_right(least=150)
    assert_idle(engine)


def test_with_noise_of_its_own(folder, heads):
    """Each draft comes with the distribution that it was drawn from."""
    llm = with_heads(folder, heads, config={"rejection_sample_method": "standard"})
    generate(llm, [LONG[:9], LONG[20:23]], params_of(40, **SAMPLED))
    assert not medusa_of(llm).coupled
    assert llm.engine.scheduler.counters.num_accepted_tokens > 0


def test_auto_has_no_more_drafts_than_heads(folder, heads):
    assert with_heads(folder, heads, "auto").engine.scheduler.drafts.num_tokens == COUNT


# ---- the embedded heads ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_embedded_heads_are_worth_it():
    """They change no token of the embedded model, and are as often right as their card says."""
    llm = check(
        Cell("embedded"), {"method": "medusa", "model": "tiny-medusa", "num_speculative_tokens": K}
    )
    counters = llm.engine.scheduler.counters
    assert counters.num_accepted_at[0] > 0.15 * counters.num_drafts > 0


# ---- what is refused ---------------------------------------------------------------------------


def refused(message: str, *arguments: Any, **fields: Any) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        with_heads(*arguments, **fields)
    assert "\n" not in str(error.value)


def test_heads_of_another_model(folder, tmp_path):
    """One weight more or less is another model."""
    refused("was trained for the weights of 'tiny' .* train heads for", folder, "tiny-medusa")
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert base_hash(open_model(other)) != base_hash(open_model(folder))
    heads = write_heads(other, tmp_path / "heads")
    refused("was trained for the weights of .*other' with hash", folder, heads)
    with_heads(other, heads)


def test_what_is_no_heads(folder, heads):
    refused("cannot be used: The folder 'tiny-medusae' has no heads.json", folder, "tiny-medusae")
    refused("heads for 4 drafts and num_speculative_tokens is 5; set it to", folder, heads, 5)
    refused("random weights have no trained heads", folder, heads, load_format="dummy")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "threads"}
    refused("draft heads run in one process and this engine has 2 ranks", folder, heads, **two)
    for field, value, message in (
        ("method", "eagle", "it has heads of method 'eagle', not 'medusa'"),
        ("num_heads", 0, "has num_heads 0; it must be 1 to 65536"),
        ("num_heads", 3, "has heads.3.down.weight of shape .*and heads.json .* gives None"),
        ("width", "24", "has width '24'; it must be"),
        ("width", 25, r"has heads.0.down.weight of shape \(32, 24\), .* gives \(32, 25\)"),
        ("base_hash", "", "with hash ''"),
    ):
        card = json.loads((heads / "heads.json").read_text())
        (heads / "heads.json").write_text(json.dumps(card | {field: value}))
        refused(message, folder, heads, 2)
        write_heads(folder, heads)


def test_a_damaged_file(folder, heads):
    file = heads / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    refused("cannot be loaded: .* is not a whole safetensors file", folder, heads)
    file.unlink()
    refused("cannot be loaded: .* has no model.safetensors", folder, heads)


# ---- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_allocated_is_what_was_planned(dtype):
    config = {"method": "medusa", "model": "tiny-medusa", "num_speculative_tokens": 4}
    llm = LLM("tiny", dtype=dtype, speculative_config=config, kv_cache_memory_bytes=3_000_000,
              max_model_len=256, swap_space=2**-9)  # fmt: skip
    plan, sizes, runner = llm.plan(), llm.engine.allocated(), llm.engine.runner
    assert sizes["draft_weights"] == plan.draft_weight_bytes
    assert sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.draft_block_bytes
    assert sizes["kv_cache"] + sizes["draft_kv_cache"] == runner.kv.num_blocks * plan.block_bytes
    assert sizes["draft_swap_space"] == runner.host.num_blocks * plan.draft_block_bytes
    assert medusa_of(llm).features.states.dtype == getattr(torch, dtype)
