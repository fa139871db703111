"""`kv_cache_dtype="int8"`: what is refused, and what plan, pool and trace say. That no setting of
an engine changes a bit is in `tests/matrix`."""

import random

import pytest
import torch

from minillm import LLM, EngineArgs, SamplingParams
from minillm.cache.spec import cache_spec
from minillm.engine.setup import kv_dtype_of
from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.roofline import step_cost
from minillm.layers.kv_cache import KVCache
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token, memory_plan
from tests.engine.small import make
from tests.models.tiny import MLA, Tiny

REFUSED = {
    "fp8": ({"kv_cache_dtype": "fp8_e4m3"}, "fp8_e4m3.*int8.* tenth of its error .*0.0087"),
    "unknown": ({"kv_cache_dtype": "int9"}, "must be one of auto, int8. Did you mean 'int8'"),
    "no name": ({"kv_cache_dtype": 8}, "kv_cache_dtype=8 is not supported"),
    "int4": ({"kv_cache_dtype": "int8_int4"}, "values in 4 bits the KL .* 0.012, .*use int8"),
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


def test_a_gpu_without_kernels_is_refused() -> None:
    """In torch each layer would wait for the GPU."""
    args, device = EngineArgs("tiny", kv_cache_dtype="int8"), torch.device("mps")
    with pytest.raises(UnsupportedFeatureError, match=r"mps needs Triton kernels.* heads have 64"):
        kv_dtype_of(args, device, preset("smollm2-135m"), None)


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


def tasks() -> list[tuple[str, str]]:
    """Prompts with their answers: a value that is asked for after other lines (needle), and text
    that comes again (copy)."""
    draw, found = random.Random(15), []
    words = ["width", "height", "count", "name", "value", "index", "start", "stop"]
    for word in words[:4]:
        others = "".join(f"{each} = None\n" for each in words if each != word)
        upper = word.upper()
        found.append((f"{word} = {upper}_LIMIT\n{others}assert {word} == {upper}_", "LIMIT"))
        names = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(4)]
        lines = [f"{name} = {draw.randint(100, 999)}\n" for name in names]
        found.append(("".join(lines) * 4 + "".join(lines[:2]), lines[2].strip()))
    functions = ("def area(self):\n    return self.width * self.height\n\n",
                 "def total(self):\n    return self.count + self.index\n\n")  # fmt: skip
    for number, each in enumerate(functions):
        head, tail = each.split("return")
        found.append(
            ("".join(functions) * 2 + functions[0] * number + head + "return", tail.strip())
        )
    return found


def solved(model: str, kind: str) -> list[bool]:
    """Which of the tasks a model solves with a cache of this kind."""
    prompts, answers = zip(*tasks(), strict=True)
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(model, dtype="float32", kv_cache_dtype=kind, max_model_len=512, block_size=32,
             num_gpu_blocks_override=176) as llm:  # fmt: skip
        outputs = llm.generate(list(prompts), params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    return [text.lstrip().startswith(answer) for text, answer in zip(texts, answers, strict=True)]


def test_needle_and_copy_tasks_have_the_same_score() -> None:
    plain = solved("tiny", "auto")
    assert any(plain)
    assert solved("tiny", "int8") == plain
