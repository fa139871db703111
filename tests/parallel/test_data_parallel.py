"""Copies of a model with own requests: their tokens are those of one, also where they share their
experts, and a copy without work keeps no other waiting (B10 of the parallelism notes)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM, SamplingParams
from minillm.errors import ConfigError, EngineDeadError, InvalidRequestError
from minillm.parallel import dispatch, executor, rank
from minillm.parallel.communicator import Traffic
from minillm.parallel.dispatch import DispatchedExperts, packed, unpacked
from minillm.parallel.experts import OwnExperts
from minillm.runner import Runner
from minillm.scheduling.data_parallel import DataParallelScheduler, schedulers_of
from minillm.scheduling.invariants import check_invariants
from minillm.trace.replay import Replay
from tests.engine.small import make
from tests.models.tiny import Tiny
from tests.parallel.rank_groups import KINDS as GROUPS
from tests.parallel.rank_groups import on_all, ranks
from tests.speculative.cells import CELLS, KINDS, Cell, Reference, open_cell, run_cell

WITHOUT_TEXT = tuple(kind for kind in KINDS if "text" not in kind and "bad" not in kind)
SHORT = {"num_hidden_layers": 2}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
MODELS = {
    "llama": Tiny("llama", SHORT | {"vocab_size": 131}),
    "mixtral": Tiny("mixtral", SHORT, seed=2),
    "qwen3_moe": Tiny("qwen3_moe", SHORT | {"vocab_size": 101, "attention_bias": True}, seed=2),
    "deepseek_v2": Tiny("deepseek_v2", SHORT | {"attention_bias": True}, seed=1),
    "deepseek_v3": Tiny("deepseek_v3", SHORT | {"vocab_size": 113}, seed=3),
}
MIXTURES = tuple(MODELS)[1:]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """What each request gets alone from one rank; computed when first asked for."""
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            folder = MODELS[name].write(tmp_path_factory.mktemp("model")).folder
            known[name] = Reference(folder, WITHOUT_TEXT)
        return known[name]

    return get


def copies(reference: Reference, num_copies: int, **more: Any) -> Reference:
    """The same reference, for engines of several copies that share their experts."""
    made = object.__new__(Reference)
    made.__dict__.update(reference.__dict__)
    usual = {"data_parallel_size": num_copies, "distributed_executor_backend": "threads"}
    made.arguments = reference.arguments | usual | {"enable_expert_parallel": True} | more
    return made


def check(
    reference: Reference,
    num_copies: int,
    cell: Cell,
    config: dict[str, Any] | None = None,
    **more: Any,
) -> LLM:
    """An engine of this many copies gives what one rank gives."""
    llm = open_cell(copies(reference, num_copies, **more), cell, config)
    try:
        outputs = run_cell(reference, llm)
        assert not reference.differences(outputs)
        scheduler = llm.engine.scheduler
        assert isinstance(scheduler, DataParallelScheduler)
        for each in scheduler.schedulers:
            check_invariants(each)
            assert each.counters.num_steps  # every copy had some of the work
        if config is not None:
            assert scheduler.counters.num_draft_tokens
    finally:
        llm.close()
    return llm


# ---- tokens ------------------------------------------------------------------------------------

ENGINES = [(name, count) for name in MIXTURES for count in (2, 3) if name == "qwen3_moe" or count < 3]
USUAL = [(*engine, CELLS[(11 * i + 3) % len(CELLS)]) for i, engine in enumerate(ENGINES * 3)]
REST = [(*engine, cell) for engine in ENGINES for cell in CELLS]
REST = [each for each in REST if each not in USUAL]


def named(cells: list[tuple[str, int, Cell]]) -> list[Any]:
    return [pytest.param(*each, id=f"{each[0]}-dp{each[1]}-{each[2]}") for each in cells]


@pytest.mark.parametrize(("name", "count", "cell"), named(USUAL))
def test_copies_with_shared_experts_give_the_tokens_of_one(name, count, cell, reference_of):
    check(reference_of(name), count, cell)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count", "cell"), named(REST))
def test_copies_give_the_tokens_of_one_in_every_cell(name, count, cell, reference_of):
    check(reference_of(name), count, cell)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_copies_that_share_nothing_give_the_tokens_of_one(name, reference_of):
    check(reference_of(name), 2, CELLS[0], enable_expert_parallel=False)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_drafts_are_verified_in_each_copy(name, reference_of):
    check(reference_of(name), 2, CELLS[0], NGRAM)
