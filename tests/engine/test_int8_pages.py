"""`kv_cache_dtype="int8"`: what is refused, and what plan, pool and trace say. That no setting of
an engine changes a bit is in `tests/matrix`."""

import pytest
import torch

from minillm import EngineArgs
from minillm.cache.spec import cache_spec
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.layers.kv_cache import KVCache
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token, memory_plan, step_cost
from tests.engine.small import make
from tests.models.tiny import MLA, Tiny

REFUSED = {
    "fp8": (
        {"kv_cache_dtype": "fp8_e4m3"},
        "fp8_e4m3.*int8.* tenth of its error .*0.0087",
    ),
    "unknown": ({"kv_cache_dtype": "int9"}, "must be one of auto, int8. Did you mean 'int8'"),
    "no name": ({"kv_cache_dtype": 8}, "kv_cache_dtype=8 is not supported"),
    "int4": ({"kv_cache_dtype": "int8_int4"}, "must be one of auto, int8"),
    "blocks": ({"kv_cache_dtype": "int8", "block_size": 6}, "6; .* must be a multiple of 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    given, message = REFUSED[name]
    with pytest.raises((ConfigError, UnsupportedFeatureError), match=message) as error:
        EngineArgs("tiny", **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("as_draft", [False, True])
def test_mla_is_refused_also_as_a_draft(as_draft: bool, tmp_path) -> None:
    folder = Tiny("deepseek_v2", MLA).write(tmp_path / "mla").folder
    target = Tiny("llama").write(tmp_path / "gqa").folder
    draft = {"speculative_config": {"model": str(folder), "num_speculative_tokens": 2}}
    kind = "draft model is of the target's kind: .*" if as_draft else ""
    with pytest.raises(UnsupportedFeatureError, match=f"{kind}does not support MLA"):
        make(target if as_draft else folder, kv_cache_dtype="int8", **(draft if as_draft else {}))


def test_a_token_takes_a_code_per_number_and_a_scale_per_head() -> None:
    """Plan, cost of a step, and tensors agree: 1.94 tokens in the place of one."""
    config = preset("smollm2-135m")  # 30 layers, 3 KV heads of 64
    token = 30 * 3 * 2 * (64 + 2)
    assert kv_bytes_per_token(config, "int8") == token
    assert round(kv_bytes_per_token(config, "bfloat16") / token, 2) == 1.94
    plan = memory_plan(config, 2**33, kv_dtype="int8")
    assert plan.block_bytes == 16 * token
    assert plan.settings.kv_dtype == "int8"
    cost = step_cost(config, [1], [100], kv_dtype="int8")
    assert (cost.kv_read_bytes, cost.kv_write_bytes) == (100 * token, token)
    assert cost.weight_bytes == step_cost(config, [1], [100]).weight_bytes
    kv = KVCache(cache_spec(config, "int8"), 30, 5, 16, torch.bfloat16, device="meta")
    assert kv.num_bytes == 5 * plan.block_bytes


def test_a_plan_that_does_not_fit_suggests_it() -> None:
    plan = memory_plan(preset("qwen3-8b"), 25 * 10**9)
    hint = 'kv_cache_dtype="int8"'
    assert hint in plan.hints
    assert memory_plan(preset("qwen3-8b"), 25 * 10**9, kv_dtype="int8").fits
    assert hint not in memory_plan(preset("deepseek-v2-lite"), 10**9).hints


def test_engine_and_trace_say_the_kind_and_the_bytes(tmp_path) -> None:
    folder = Tiny("llama").write(tmp_path).folder
    with make(folder, kv_cache_dtype="int8_per_token_head", swap_space=0.001) as llm:
        plan, settings = llm.plan(), llm.trace.settings
        assert (plan.settings.kv_dtype, plan.kv_bytes_per_token) == ("int8", 3 * 2 * 2 * (16 + 2))
        assert (settings.kv_dtype, settings.kv_bytes_per_token) == ("int8", 3 * 2 * 2 * (16 + 2))
        allocated = llm.engine.allocated()
        assert allocated["kv_cache"] == plan.kv_cache_bytes == 64 * plan.block_bytes
        assert allocated["swap_space"] == int(0.001 * 2**30) // plan.block_bytes * plan.block_bytes
