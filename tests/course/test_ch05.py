"""Chapter 05: its functions by brute force."""

from dataclasses import replace

import pytest

from minillm import LLM
from minillm.lab.hardware import DATASHEET
from minillm.lab.roofline import step_time
from minillm.models.presets import preset
from minillm.plan.cost import kv_bytes_per_token
from minillm_exercises.chapters import ch05

CARD, H100 = DATASHEET["rtx-5070-ti"], DATASHEET["h100-sxm"]
TWICE = replace(CARD, peak_flops=2 * CARD.peak_flops)
QWEN, SMALL = preset("qwen2.5-3b"), preset("smollm2-135m")


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", enforce_eager=True)


def test_a_hollow_model_makes_the_same_calls_with_hardly_any_weights(tiny):
    twin = ch05.hollow(tiny, dtype="float32", device="cpu", max_model_len=64, enforce_eager=True)
    sizes = [sum(p.numel() for p in llm.engine.forward_pass.model.parameters())
             for llm in (tiny, twin)]  # fmt: skip
    assert sizes[1] < sizes[0] / 4
    for batch in (1, 3):
        assert ch05.count_calls(twin, batch) == ch05.count_calls(tiny, batch)
    caches = [kv_bytes_per_token(llm.engine.source.config, "float32") for llm in (tiny, twin)]
    assert caches[0] == caches[1]


@pytest.mark.parametrize("context", [1, 200, 1024, 1500])
@pytest.mark.parametrize("machine", [CARD, TWICE, DATASHEET["laptop-ddr5"]])
def test_turn_is_the_first_batch_whose_operations_take_as_long(machine, context):
    def computes(batch: int) -> bool:
        time = step_time(ch05.decode_cost(QWEN, batch, context), machine)
        return time.compute_seconds >= time.memory_seconds

    at = ch05.turn(QWEN, machine, context)
    if at is None:
        assert not any(computes(2**power) for power in range(14))
    else:
        assert computes(at)
        assert at == 1 or not computes(at - 1)
