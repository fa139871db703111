"""Whatever an engine does to a request, it gets what it gets alone.

Prompts are cut into chunks, found half in a cache, lose their blocks, run among others, are planned
ahead, recorded, drafted, shared by ranks, in every family and with quantised weights. `make test`
runs a table of cells in which any two settings of one rank meet, each family and each division
among ranks somewhere; tables in which these meet every setting, and most of four or more ranks, are
slow.
"""

from dataclasses import replace
from random import Random

import pytest
import torch

from minillm.ops import cpu
from tests.matrix.cells import MARGIN, QUANTISED, Cell, check, reference_of
from tests.matrix.jobs import generate
from tests.matrix.table import all_pairs, allowed, pairs, random_cells, table

SMALL = 1  # the seed of the table of `make test`: of sixty seeds the one with the cheapest cells
TABLES = 2  # slow ones, each of which has what the one of `make test` has, and more
# Ranks that take four seconds and more of few processors; two of two stages stay.
MANY = (
    *("tp 3", "tp 4", "tp 6", "tp 8", "tp 3, pp 2"),
    *("experts 4", "experts 2, pp 2", "copies 2", "copies 3"),
)
EXACT, FAST = "exact float32", "exact bfloat16"
INT8 = {  # keys and values in 8 bits, in both kinds of pages and of arithmetic
    Cell("llama", EXACT, chunk=7, cache="hash", pool="swap", kv="int8"),
    Cell("mistral", FAST, chunk=32, cache="radix", pool="recompute", overlaps=True, kv="int8"),
    Cell("llama", FAST, drafts="draft model", pool="swap", kv="int8"),
    Cell("eight heads", FAST, chunk=7, ranks="tp 2", kv="int8"),
    Cell("llama", EXACT, path="operations", chunk=7, cache="hash", kv="int8"),
}
INT8_SLOW = {
    Cell("qwen2", EXACT, drafts="right", cache="radix", kv="int8"),
    Cell("mistral", FAST, drafts="medusa", cache="hash", pool="swap", kv="int8"),
    Cell("eight heads", FAST, drafts="eagle", chunk=7, cache="radix", pool="recompute", kv="int8"),
    Cell("qwen3_moe", FAST, chunk=7, cache="hash", pool="recompute", kv="int8"),
    Cell("mistral", EXACT, path="torch", chunk=7, cache="radix", pool="swap", kv="int8"),
}


def parameters(with_slow: bool) -> list:
    """The cells of all tables, those with the same answers beside each other."""
    usual = {*table(SMALL, True), *INT8}
    tables = {cell for seed in range(TABLES if with_slow else 0) for cell in table(seed)}
    token_by_token = Cell("llama", chunk=1, cache="hash", pool="swap", overlaps=True)
    rest = (tables | INT8_SLOW | {token_by_token}) - usual
    slow = rest | {cell for cell in usual if cell.ranks in MANY}
    return [
        pytest.param(cell, id=str(cell), marks=[pytest.mark.slow] * (cell in slow))
        for cell in sorted(usual | rest, key=lambda cell: (str(cell.alone()), str(cell)))
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Slow tables take two seconds to make: only where they may be run."""
    if "cell" in metafunc.fixturenames:
        with_slow = "not slow" not in metafunc.config.getoption("markexpr")
        metafunc.parametrize("cell", parameters(with_slow))


def test_tokens_are_those_that_a_request_gets_alone(cell: Cell) -> None:
    usual = replace(cell, path="usual", graphs=False, ranks="one")
    if torch.cuda.is_available() and (cell != usual or cell.model in QUANTISED):
        pytest.skip("this is a path of processors")
    if cell.exact and cell.ranks != "one" and cpu.functions(torch.bfloat16) is None:
        pytest.skip(cpu.describe(torch.bfloat16))
    check(cell)


@pytest.mark.parametrize(
    "small", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["small", "whole"]
)
def test_any_two_settings_meet(small: bool) -> None:
    cells, dice = table(SMALL if small else 0, small), Random(1)
    met = set().union(*map(pairs, cells))
    for one, this, other, that in (pair for pair in all_pairs(small) if pair not in met):
        assert not list(random_cells(dice, **{one: this, other: that})), (this, that)
    assert all(map(allowed, cells))


@pytest.mark.parametrize("model", ["bytes", "llama", "deepseek_v2", "qwen3_moe"])
def test_alone_is_generation_without_scheduler_blocks_or_cache(model: str) -> None:
    reference, wrong, ties = reference_of(Cell(model)), [], 0
    for job in reference.jobs:
        if job.params.bad_words or job.params.stop:
            continue  # the row below knows nothing of texts
        for completion in reference.outputs[job.kind].outputs:
            ids = list(completion.token_ids)
            logits = reference.logits(job, ids[:-1])
            for step, token in enumerate(ids):
                row = logits[step : step + 1].clone()
                if reference.choose(job, completion.index, ids[:step], row.clone()) == token:
                    continue
                row[0, token] += MARGIN
                ties += 1
                if reference.choose(job, completion.index, ids[:step], row) != token:
                    wrong.append((job.kind, completion.index, step))
    assert not wrong
    assert ties <= 1


def test_a_wrong_token_is_a_difference_and_a_near_tie_is_none(monkeypatch) -> None:
    reference = reference_of(Cell("llama"))
    job = reference.job("greedy")
    (mine,) = reference.outputs["greedy"].outputs
    ids = list(mine.token_ids)
    changed = {"wrong": [*ids[:7], (ids[7] + 1) % 128, *ids[8:]], "short": ids[:-1]}
    (output,) = generate(reference.llm, [job])
    for token_ids in changed.values():
        output.outputs[0].token_ids = token_ids
        assert reference.differences([output], [job])
    assert reference.differences([output], [job], exact=True)
    output.outputs[0].token_ids = changed["wrong"]
    for gap, excused in ((0.5, True), (2.0, False)):
        logits = torch.zeros(8, 128)
        logits[7, ids[7]], logits[7, changed["wrong"][7]] = 5.0, 5.0 - gap * MARGIN
        monkeypatch.setattr(reference, "logits", lambda *_, logits=logits: logits.clone())
        assert reference.near_tie(job, mine, output.outputs[0]) is excused
