"""Chapter 07: the allocator that its reader sees beside the engine's, and who copies blocks."""

import json
import random
from typing import Any

import pytest
from notebook_chapter import NOTEBOOKS

from minillm import LLM, SamplingParams
from minillm.lab.simulation import Simulation
from minillm_exercises.chapters import ch07
from minillm_exercises.chapters.ch07 import Work, serve

CELLS = json.loads((NOTEBOOKS / "07_paged_attention.ipynb").read_text("utf-8"))["cells"]


def from_the_chapter(*names: str) -> dict[str, Any]:
    """Classes and functions as the chapter prints them."""
    found: dict[str, Any] = {"SIZE": 16}
    for cell in CELLS:
        source = "".join(cell["source"])
        if any(source.startswith((f"class {name}", f"def {name}(")) for name in names):
            exec(source, found)
    return found


SHOWN = from_the_chapter("FirstFit", "Blocks", "why")
FirstFit, Blocks, why = SHOWN["FirstFit"], SHOWN["Blocks"], SHOWN["why"]


def some(seed: int, count: int = 40, cap: int = 256) -> list[Work]:
    draw = random.Random(seed)
    totals = [draw.randint(2, cap) for _ in range(count)]
    return [Work(i, draw.randint(1, total), total) for i, total in enumerate(totals)]


@pytest.mark.parametrize("size", [1, 4, 16, 256])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_behave_as_the_engine(size, seed):
    """As many run, and as much is free, in every step; preemptions included."""
    works = some(seed)
    moments = serve(Blocks(1024, size), works, why)
    simulation = Simulation(1024 // size, size, max_num_seqs=99, watermark=0)
    for work in works:
        simulation.add(work.prompt, work.total - work.prompt + 1)
    found = [(r.num_running, r.num_free_blocks * size) for r in simulation.run()]
    assert found == [(m.running, m.free) for m in moments]
    if size < 256:
        theirs = simulation.scheduler.counters.num_preemptions_recompute
        assert sum(moment.preempted for moment in moments) == theirs > 0


# ---- the engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", block_size=16, max_model_len=128,
               num_gpu_blocks_override=32)  # fmt: skip


def test_holders_are_those_of_the_tables():
    simulation = Simulation(9, 16)
    simulation.add(20, 16, n=3)
    steps = ch07.holders(simulation)
    assert steps[0] == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert steps[1] == {0: [1, 2, 3], 1: [3], 2: [1], 3: [2]}


def test_completions_are_confirmed_and_a_wrong_one_is_not(tiny):
    params = SamplingParams(max_tokens=6, n=3, temperature=1, seed=3, logprobs=0, ignore_eos=True)
    (output,) = tiny.generate([{"prompt_token_ids": [7] * 20}], params, use_tqdm=False)
    assert ch07.confirmed(tiny, output) == [True] * 3
    output.outputs[1].token_ids[2] ^= 1
    assert ch07.confirmed(tiny, output) == [True, False, True]


def test_reasons_are_told_apart():
    assert why(wanted=300, free=500, never=0, needed=300) == "no hole"
    assert why(wanted=2048, free=0, never=700, needed=700) == "over-reserved"
    assert why(wanted=2048, free=0, never=699, needed=700) == "full"
