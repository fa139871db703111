"""Medusa heads: every draft is that of the formula in float64, whatever happened to its sequence.

The hidden state that a draft is compared with is that of a pass over the text without an engine, so
a state of another row, of a rejected draft or of an earlier owner of a block gives other drafts.
That drafts change no token is in the cells of `tests/matrix` with drafts "medusa": random heads
with each setting of mode, path, pool, prefix cache and graphs, and once with pages of 8 bits.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm import LLM
from minillm.errors import CheckpointError, ConfigError, UnsupportedFeatureError
from minillm.models.checkpoint import open_model
from minillm.speculative.heads import base_hash
from tests.engine.small import make
from tests.matrix.cells import Cell, check
from tests.matrix.proposers import K
from tests.models.tiny import Tiny
from tests.pairs import some
from tests.speculative.headed import COUNT, HeadWatch, medusa_of, with_heads, write_heads
from tests.speculative.test_draft_model import (
    LONG,
    SAMPLED,
    Toggled,
    generate,
    params_of,
    run_history,
)


@pytest.fixture
def heads(folder: Path, tmp_path: Path) -> Path:
    """Heads of the small model."""
    return write_heads(folder, tmp_path / "heads")


@pytest.mark.parametrize("how", [{"temperature": 0.0}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_are_those_of_the_formula(folder, heads, monkeypatch, how):
    prompts = [LONG[:9], LONG[20:21], LONG[40:60]]
    params = params_of(30, **how)
    llm = with_heads(folder, heads)
    watch = HeadWatch(llm, heads, monkeypatch)
    found = generate(llm, prompts, params)
    assert found == generate(make(folder, max_model_len=128), prompts, params)
    watch.assert_right(least=100)


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_of_an_output_matrix_of_its_own(tmp_path, monkeypatch, family):
    model = Tiny(family, {"num_hidden_layers": 2}).write(tmp_path / "model").folder
    heads = write_heads(model, tmp_path / "heads")
    llm = with_heads(model, heads, max_model_len=96)
    watch = HeadWatch(llm, heads, monkeypatch)
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
    watch, engine = HeadWatch(llm, heads, monkeypatch), llm.engine
    engine.scheduler.drafts = Toggled(seed)
    ways = {"temperature": 0.0}, {"n": 3}, {}
    run_history(engine, choose, 16, 40, lambda i: {"seed": i} | choose.choice(ways))
    counters = engine.scheduler.counters
    assert counters.num_cached_tokens > 0
    assert (counters.num_preemptions_swap, counters.num_preemptions_recompute)[1 - seed % 2] > 0
    watch.assert_right(least=150)


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

REFUSALS = ConfigError, CheckpointError, UnsupportedFeatureError
TWO = {"distributed_executor_backend": "threads"}
NOT_MADE = "has no heads.json; give a folder that 'minillm train medusa' wrote"
# What is wrong: a field of heads.json, the drafts, an argument or the content of a file; the error.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": ({"heads": "tiny-medusae"}, "model 'tiny-medusae' " + NOT_MADE),
    "a model": ({"heads": "tiny-draft"}, "model 'tiny-draft' " + NOT_MADE),
    "of tiny": ({"heads": "tiny-medusa"}, "was trained for the weights of 'tiny' .* train heads"),
    "another method": ({"method": "eagle"}, "has heads of method 'eagle', not 'medusa'"),
    "no hash": ({"base_hash": ""}, "with hash '', and those of .* have '"),
    "no heads": ({"num_heads": 0}, "has num_heads 0; it must be 1 to 15"),
    "true heads": ({"num_heads": True}, "has num_heads True; it must be 1 to 15"),
    "many heads": ({"num_heads": 16}, "has num_heads 16; it must be 1 to 15"),
    "fewer heads": ({"num_heads": 3}, "has heads.3.down.weight .*and heads.json .* gives None"),
    "width of text": ({"width": "24"}, "has width '24'; it must be 1 to 65536"),
    "another width": ({"width": 25}, r"heads.0.down.weight of shape \(32, 24\), .* \(32, 25\)"),
    "too many drafts": ({"num_drafts": 5}, "heads for 4 drafts and .* is 5; set it to at most 4"),
    "random weights": ({"load_format": "dummy"}, "random weights have no trained heads; leave out"),
    "tensor ranks": (TWO | {"tensor_parallel_size": 2}, "one process and this engine has 2 ranks"),
    "stages": (TWO | {"pipeline_parallel_size": 2}, "drafting needs tokens that are still in the"),
    "copies": (TWO | {"data_parallel_size": 2}, "one process and this engine has 2 ranks"),
    "card of a list": ({"heads.json": b"[]"}, "holds a list; it must be a JSON object"),
    "half a card": ({"heads.json": b"{"}, "is not valid JSON"),
    "half a file": ({"model.safetensors": -9}, "cannot be loaded: .* is not a whole safetensors"),
    "an empty file": ({"model.safetensors": 0}, "cannot be loaded: .* is not a"),
    "no file": ({"model.safetensors": None}, "cannot be loaded: .* has no model.safetensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_heads_for_this_engine(folder, heads, name):
    wrong, message = REFUSED[name]
    given = {"num_drafts": 2, "heads": heads} | wrong
    card = json.loads((heads / "heads.json").read_text())
    card |= {key: given.pop(key) for key in card if key in given}
    (heads / "heads.json").write_text(json.dumps(card))
    for file in ("heads.json", "model.safetensors"):
        if file in given:
            content, whole = given.pop(file), (heads / file).read_bytes()
            (heads / file).unlink()
            if content is not None:
                content = whole[:content] if isinstance(content, int) else content
                (heads / file).write_bytes(content)
    refused(message, folder, **given)


def refused(message: str, *arguments: Any, **fields: Any) -> None:
    """In one line."""
    with pytest.raises(REFUSALS, match=message) as error:
        with_heads(*arguments, **fields)
    assert "\n" not in str(error.value)


def test_heads_of_another_model(folder, tmp_path):
    """One weight more or less is another model."""
    other = shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    assert base_hash(open_model(other)) != base_hash(open_model(folder))
    heads = write_heads(other, tmp_path / "heads")
    refused("was trained for the weights of .*other' with hash", folder, heads)
    with_heads(other, heads)


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
