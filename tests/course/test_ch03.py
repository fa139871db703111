"""Chapter 03's own functions: counted equals computed, and the drawings say what they show."""

from dataclasses import replace

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.lab.hardware import DATASHEET
from minillm.models.presets import preset
from minillm_exercises.chapters import ch03

H100, SMALL = DATASHEET["h100-sxm"], preset("smollm2-135m")


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu")


def generate(llm: LLM, prompt: list[int], new: int) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return list(llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids)


def test_a_bound_is_a_time_that_no_program_can_beat():
    """A price per call can be overlapped, so it is no part of a bound."""
    (cost,) = ch03.steps(SMALL, 6, 1, cached=True)
    slow_calls = replace(H100, overhead=1.0)
    assert ch03.least_seconds(cost, slow_calls) == ch03.least_seconds(cost, H100)
    halves = replace(H100, bandwidth=H100.bandwidth / 2)
    assert ch03.least_seconds(cost, halves) == 2 * ch03.least_seconds(cost, H100)


def test_rotated_changes_later_passes_only_and_undoes_itself(tiny):
    rope, seen = tiny.engine.forward_pass.model.rope, []
    handle = rope.register_forward_hook(lambda rope, args, out: seen.append(args[0].tolist()))
    with ch03.rotated(tiny, 1):
        generate(tiny, [5, 6, 7], 2)
    generate(tiny, [5, 6, 7], 2)
    handle.remove()
    assert seen == [[0, 1, 2], [4], [0, 1, 2], [3]]


def test_middles_and_what_is_built_on_them():
    assert ch03.middles([1, 9, 2, 4, 4, 80], 3) == [2, 4]
    slow, fast = [2] * 8 + [3] * 8 + [6] * 8, [2] * 8 + [2] * 8 + [3] * 7 + [900]
    assert ch03.clock_ratio(slow, fast) == 11 / 7


def test_leads_are_negative_where_another_token_wins():
    rows = torch.tensor([[1.0, 4.0, 2.0], [1.0, 4.0, 2.0]])
    assert ch03.leads(rows, [1, 2]) == [2.0, -2.0]
