"""Chapter 07's own functions, the allocators that its reader sees, and the claims about paged KV
memory that are arithmetic or simulation."""

import json
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from notebook_chapter import NOTEBOOKS

from minillm import LLM, SamplingParams
from minillm.cache.manager import BlockManager, BlockTable
from minillm.lab.simulation import Simulation
from minillm.ops import cpu
from minillm_exercises.chapters import ch07
from minillm_exercises.chapters.ch07 import Work, serve
from minillm_kernels import reference

CELLS = json.loads((NOTEBOOKS / "07_paged_attention.ipynb").read_text("utf-8"))["cells"]
KINDS = ("reserved", "exact", "blocks")


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


def make(kind: str, slots: int, size: int = 16, cap: int = 256) -> Any:
    if kind == "blocks":
        return Blocks(slots, size)
    return FirstFit(slots, cap if kind == "reserved" else None)


def some(seed: int, count: int = 40, cap: int = 256) -> list[Work]:
    draw = random.Random(seed)
    totals = [draw.randint(2, cap) for _ in range(count)]
    return [Work(i, draw.randint(1, total), total) for i, total in enumerate(totals)]


def ranges(memory: Any) -> list[tuple[int, int]]:
    """What each request holds, as (start, length)."""
    if isinstance(memory, FirstFit):
        return [(memory.start[name], memory.held[name]) for name in memory.held]
    return [(b * memory.size, memory.size) for table in memory.tables.values() for b in table]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_slots_are_held_once_or_free(kind, seed):
    memory, draw, here = make(kind, 2048), random.Random(seed), list[Work]()
    for work in some(seed, 300):
        if memory.begin(work, work.prompt):
            here.append(work)
        for each in list(here):
            if draw.random() < 0.2 or not memory.grow(each.name, min(each.total, each.prompt + 20)):
                memory.end(each.name)
                here.remove(each)
        held = sorted(ranges(memory))
        assert all(a + n <= b for (a, n), (b, _) in pairwise(held))
        assert sum(n for _, n in held) + memory.free == 2048
        assert sum(memory.held.values()) + memory.free == 2048
    for each in here:
        memory.end(each.name)
    assert memory.free == 2048
    assert memory.begin(Work(999, 256, 256), 256)


def test_holes_grow_together():
    memory = FirstFit(300)
    for name in range(3):
        assert memory.begin(Work(name, 1, 100), 1)
    memory.end(0)
    memory.end(2)
    assert memory.free == 200
    assert not memory.begin(Work(3, 1, 150), 1)
    memory.end(1)
    assert memory.holes == [(0, 300)]


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


@pytest.mark.parametrize("seed", range(3))
def test_tables_are_the_engines(seed):
    """The same blocks in the same order, which the chapter does not say but a reader may try."""
    mine, draw = Blocks(512, 16), random.Random(seed)
    theirs = BlockManager(32, 16)
    tables: dict[int, BlockTable] = {}
    for name in range(60):
        length = draw.randint(1, 90)
        if mine.begin(Work(name, length, length), length):
            tables[name] = BlockTable()
            theirs.grow(tables[name], 0, length)
        if len(tables) > 4:
            gone = draw.choice(list(tables))
            mine.end(gone)
            theirs.release(tables.pop(gone))
        assert mine.tables == {name: table.blocks for name, table in tables.items()}


def test_reasons_are_told_apart():
    assert why(wanted=300, free=500, never=0, needed=300) == "no hole"
    assert why(wanted=2048, free=0, never=700, needed=700) == "over-reserved"
    assert why(wanted=2048, free=0, never=699, needed=700) == "full"


# ---- the engine ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return LLM("tiny", dtype="float32", device="cpu", block_size=16, max_model_len=128,
               num_gpu_blocks_override=32)  # fmt: skip


def generate(llm: LLM, length: int, new: int, **settings: Any) -> Any:
    params = SamplingParams(max_tokens=new, ignore_eos=True, **settings)
    (output,) = llm.generate([{"prompt_token_ids": [7] * length}], params, use_tqdm=False)
    return output


def test_batches_are_seen_and_taken_apart(tiny):
    with ch07.batches(tiny) as seen:
        generate(tiny, 20, 3, temperature=0)
    generate(tiny, 20, 3, temperature=0)
    rows = list(ch07.rows_of(seen))
    assert [positions for _, positions, _ in rows] == [[*range(20)], [20], [21]]
    tables, counts = ch07.tables_of(seen[-1], 16)
    assert counts == {"A": 22}
    assert len(tables["A"]) == 2
    assert rows[-1][2] == [tables["A"][1] * 16 + 5]


def test_completions_are_confirmed_and_a_wrong_one_is_not(tiny):
    output = generate(tiny, 20, 6, n=3, temperature=1, seed=3, logprobs=0)
    assert ch07.confirmed(tiny, output) == [True] * 3
    output.outputs[1].token_ids[2] ^= 1
    assert ch07.confirmed(tiny, output) == [True, False, True]


def test_attention_copies_no_blocks_in_c_and_all_of_them_in_torch(tiny, monkeypatch):
    """The chapter's explanation of its last measurement."""
    in_c = cpu.takes_attention(torch.ones(1, 4, 64), *2 * [torch.ones(1, 2, 16, 64)])
    gathered = []
    gather = reference.gather_blocks
    monkeypatch.setattr(
        reference, "gather_blocks", lambda *args: gathered.append(args) or gather(*args)
    )
    generate(tiny, 20, 3, temperature=0)
    assert in_c == (not gathered)
    if in_c:
        assert {ch07.copied(size) for size in (1, 4, 16, 64, 256, 512)} == {0}
    monkeypatch.setattr(cpu, "takes_attention", lambda *tensors: False)
    assert ch07.copied(16) == 320 * 2 * 64 * 4
    assert ch07.copied(512) == 0
    generate(tiny, 20, 3, temperature=0)
    assert gathered


def test_holders_are_those_of_the_tables():
    simulation = Simulation(9, 16)
    simulation.add(20, 16, n=3)
    steps = ch07.holders(simulation)
    assert steps[0] == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert steps[1] == {0: [1, 2, 3], 1: [3], 2: [1], 3: [2]}
