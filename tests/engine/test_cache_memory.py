"""What the KV cache costs: by hand, by the formula, in the tensors, and in the process's memory."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minillm import LLM, EngineArgs, SamplingParams
from minillm.cache.spec import CacheSpec, cache_spec
from minillm.engine.setup import plan_memory
from minillm.lab.roofline import step_cost
from minillm.layers.kv_cache import KVCache
from minillm.models.checkpoint import open_model
from minillm.models.presets import preset
from minillm.plan.cost import BatchFit, block_bytes, kv_bytes_per_token, memory_plan
from tests.matrix.cells import folder_of

# Bytes of one token in one layer, and over all layers, in float32. GQA keeps K and V of 2 heads of
# 16 (qwen3_moe: 24) values; MLA keeps one latent of 32 values and one rotated key of 8.
BY_HAND = {
    "llama": (2 * 2 * 16 * 4, 512),
    "qwen3_moe": (2 * 2 * 24 * 4, 768),
    "deepseek_v2": ((32 + 8) * 4, 320),
}
SHARE = 0.05


def storage_bytes(tensors: list[Tensor]) -> int:
    """Memory behind tensors, that of several views counted once."""
    opaque = [tensor for tensor in tensors if tensor.layout is torch._mkldnn]  # one memory each
    plain = [tensor for tensor in tensors if tensor.layout is not torch._mkldnn]
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in plain}
    shared = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    return shared + sum(tensor.nbytes for tensor in opaque)


def weight_tensors(llm: LLM) -> list[Tensor]:
    """All that a loaded model keeps."""
    model = llm.engine.runner.model
    return [*model.parameters(), *model.buffers()]


@pytest.mark.parametrize("family", BY_HAND)
def test_bytes_per_token_are_those_counted_by_hand(family):
    layer, token = BY_HAND[family]
    llm = LLM(folder_of(family), dtype="float32", block_size=8, num_gpu_blocks_override=50,
              swap_space=2**-10)  # fmt: skip
    config, runner = llm.engine.source.config, llm.engine.runner
    spec = cache_spec(config)
    assert spec == runner.kv.spec
    assert [spec.block_bytes(size, 4) for size in (1, 8)] == [layer, 8 * layer]
    assert spec.block_bytes(1, torch.bfloat16.itemsize) == layer // 2
    assert llm.plan().block_bytes == block_bytes(config, 8, "float32") == 8 * token
    assert kv_bytes_per_token(config, "float32") == token == llm.plan().kv_bytes_per_token
    assert runner.kv.num_bytes == 50 * 8 * config.num_layers * layer == 50 * 8 * token
    assert storage_bytes([runner.kv.key, runner.kv.value]) == runner.kv.num_bytes
    assert llm.engine.scheduler.blocks.pool.num_blocks == 50
    host_blocks = 2**20 // (8 * token)
    assert runner.host.num_bytes == host_blocks * 8 * token
    assert llm.engine.scheduler.blocks.host.num_blocks == host_blocks


@pytest.mark.parametrize("family", BY_HAND)
def test_a_token_is_in_the_slots_that_were_counted_and_nowhere_else(family):
    llm = LLM(folder_of(family), dtype="float32", block_size=8, num_gpu_blocks_override=50,
              max_model_len=64, enable_prefix_caching=False)  # fmt: skip
    kv = llm.engine.runner.kv
    kv.key.fill_(torch.nan)
    kv.value.fill_(torch.nan)
    llm.generate([[5] * 19], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), False)
    computed = 19 + 2  # the last new token is never computed
    tensors = [kv.key] if kv.spec.value_in_key else [kv.key, kv.value]
    written = sum(int((~tensor.isnan()).sum()) for tensor in tensors)
    assert written * 4 == computed * BY_HAND[family][1]


@pytest.mark.parametrize("family", [*BY_HAND, "tiny"])
def test_the_plan_is_within_five_percent_of_the_tensors(family):
    model = "tiny" if family == "tiny" else folder_of(family)
    llm = LLM(model, dtype="float32", kv_cache_memory_bytes=3_000_000)
    plan, kv = llm.plan(), llm.engine.runner.kv
    assert storage_bytes(weight_tensors(llm)) == pytest.approx(plan.weight_bytes, rel=SHARE)
    assert kv.num_bytes == plan.num_tokens * plan.kv_bytes_per_token
    assert kv.num_bytes <= plan.kv_cache_bytes == 3_000_000
    assert kv.num_bytes == pytest.approx(plan.kv_cache_bytes, rel=SHARE)


def test_a_context_that_does_not_fit_is_reduced_to_what_does():
    args = EngineArgs("tiny", block_size=8, num_gpu_blocks_override=5)
    length, plan = plan_memory(args, open_model("tiny"), "float32", torch.device("cpu"))
    assert length == plan.settings.max_model_len == plan.num_tokens == 40
    assert plan.combinations == (BatchFit(40, 1),)
    assert (plan.fits, plan.hints) == (True, ())


MEASURE = """
    import json, torch
    from minillm import LLM, SamplingParams
    import minillm.engine.loop

    def resident():
        with open("/proc/self/status") as lines:
            (line,) = (line for line in lines if line.startswith("VmRSS"))
        return int(line.split()[1]) * 1024

    with torch.inference_mode():  # what torch itself allocates when it is first used
        (torch.ones(64, 64) @ torch.ones(64, 64)).softmax(-1)
    before = resident()
    llm = LLM("preset:smollm2-135m", load_format="dummy", device="cpu", dtype=DTYPE,
              max_model_len=2048, kv_cache_memory_bytes=2**28)
    loaded, runner, plan = resident(), llm.engine.runner, llm.plan()
    runner.kv.key.fill_(0)
    runner.kv.value.fill_(0)
    touched = resident()
    llm.generate([[1] * 100] * 8, SamplingParams(temperature=0, max_tokens=3), use_tqdm=False)
    print(json.dumps({
        "plan": [plan.weight_bytes, plan.num_tokens * plan.kv_bytes_per_token],
        "resident": [loaded - before, touched - loaded],
        "running": resident() - touched,
        "activations": plan.activation_bytes,
    }))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_process_grows_by_what_was_planned(dtype):
    code = textwrap.dedent(MEASURE).replace("DTYPE", repr(dtype))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    weights, cache = result["plan"]
    assert result["resident"] == [
        pytest.approx(weights, rel=SHARE),
        pytest.approx(cache, rel=SHARE),
    ]
    assert sum(result["resident"]) == pytest.approx(weights + cache, rel=SHARE)
    # A first step adds what the plan calls activations, which is an upper bound here: 800 of the
    # 2,048 tokens that it counts with.
    assert result["running"] < result["activations"]


def test_a_part_of_a_block_is_counted_by_plan_cost_and_pool_alike(monkeypatch):
    """As the scales of a quantised cache will be: two more bytes for each head and position."""
    config, shapes = preset("qwen3-0.6b"), CacheSpec.block_shapes
    before = KVCache(cache_spec(config), 28, 3, 16, torch.bfloat16, device="meta").num_bytes
    costs = step_cost(config, [1], [100], dtype="bfloat16")

    def with_scales(self, block_size):
        return {**shapes(self, block_size), "scales": (self.num_kv_heads, block_size, 1)}

    monkeypatch.setattr(CacheSpec, "block_shapes", with_scales)
    scale = 28 * 8 * 2  # layers x KV heads x bytes, for each token
    kv = KVCache(cache_spec(config), 28, 3, 16, torch.bfloat16, device="meta")
    assert kv.num_bytes - before == 3 * 16 * scale
    plan = memory_plan(config, 2**34, max_model_len=4096)
    assert plan.block_bytes * 3 == kv.num_bytes
    assert plan.num_tokens == plan.kv_cache_bytes // plan.block_bytes * 16
    dearer = step_cost(config, [1], [100], dtype="bfloat16")
    assert dearer.kv_read_bytes - costs.kv_read_bytes == 100 * scale
    assert dearer.kv_write_bytes - costs.kv_write_bytes == scale
