"""Drafts change no token: whatever is proposed, each request gets what it gets alone without them.

Every run has requests of all kinds together (`cells.KINDS`), so each cell is one engine with one
proposer. A new proposer is tested by its configuration: `check(reference, cell, config)`.
"""

import logging
import shutil
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from minillm import LLM, SamplingParams
from minillm.scheduling.record import Counters
from tests.engine.bitwise import FAMILIES
from tests.engine.small import assert_idle, make, tokens, write_model
from tests.execution.test_graphs import give_graphs
from tests.speculative.cells import (
    CELLS,
    KINDS,
    Cell,
    Job,
    Reference,
    fields_of,
    generate,
    open_cell,
    run_cell,
)
from tests.speculative.proposers import FAILING, SOUND, K, Now, Right

WARNING = "Speculative decoding is off from now on"
WITHOUT_TEXT = tuple(kind for kind in KINDS if "text" not in kind and "bad" not in kind)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def check(
    reference: Reference, cell: Cell, config: dict[str, Any], exact: bool = False
) -> Counters:
    """One engine with these drafts gives what the plain one gives."""
    llm = open_cell(reference, cell, config)
    outputs = run_cell(reference, llm)
    found = reference.differences(outputs, exact=exact)
    assert not found
    counters = llm.engine.scheduler.counters
    preempted = counters.num_preemptions_recompute, counters.num_preemptions_swap
    assert [count > 0 for count in preempted] == [cell.pool == "recompute", cell.pool == "swap"]
    assert (counters.num_cached_tokens > 0) == (cell.cache != "off")
    return counters


def assert_drafted(proposer: str, counters: Counters) -> None:
    """The proposer did what it is there for."""
    accepted, drafted = counters.num_accepted_tokens, counters.num_draft_tokens
    assert (drafted > 100) == (proposer != "nothing")
    if proposer in ("right", "too many"):
        assert accepted > 0.95 * drafted
    elif proposer in ("wrong", "nothing"):
        assert accepted == 0
    elif proposer != "anything":
        assert 0 < accepted < drafted
    assert len(counters.num_accepted_at) <= K


def named(pairs: list[tuple[Cell, str]]) -> list[Any]:
    return [pytest.param(cell, name, id=f"{cell}-{name}") for cell, name in pairs]


# One proposer for each engine, so that each meets every setting of every axis.
USUAL = [(cell, SOUND[(i + i // 8) % 8]) for i, cell in enumerate(CELLS)]
REST = [pair for pair in product(CELLS, SOUND) if pair not in USUAL]


@pytest.mark.parametrize(("cell", "proposer"), named(USUAL))
def test_the_outputs_are_those_without_drafts(
    cell: Cell, proposer: str, reference: Reference
) -> None:
    assert_drafted(proposer, check(reference, cell, reference.config(proposer)))


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "proposer"), named(REST))
def test_the_rest_of_the_matrix(cell: Cell, proposer: str, reference: Reference) -> None:
    assert_drafted(proposer, check(reference, cell, reference.config(proposer)))


@pytest.fixture(scope="module")
def noisy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with noise on its weights: a draft model that is often right."""
    copy = tmp_path_factory.mktemp("noisy-model")
    model = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.01)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    model.save_pretrained(copy)
    return copy


FEW = [Cell(7, "radix", "recompute", True), Cell(0, "hash", "swap", False)]
FEW += [Cell(7, "off", "swap", True), Cell(0, "radix", "ample", True)]


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, id=str(cell), marks=[] if cell in FEW else [pytest.mark.slow])
        for cell in CELLS
    ],
)
def test_a_draft_model(cell: Cell, reference: Reference, noisy: Path) -> None:
    config = {"model": str(noisy), "num_speculative_tokens": K}
    counters = check(reference, cell, config)
    assert 0.2 < counters.num_accepted_tokens / counters.num_draft_tokens < 0.95


def test_every_proposer_meets_every_setting() -> None:
    axes: dict[str, Callable[[Cell], Any]] = {
        "chunk": lambda cell: cell.chunk,
        "cache": lambda cell: cell.cache,
        "pool": lambda cell: cell.pool,
        "overlaps": lambda cell: cell.overlaps,
    }
    for axis in axes.values():
        met = {(name, axis(cell)) for cell, name in USUAL}
        assert met == set(product(SOUND, {axis(cell) for cell in CELLS}))
    for one, other in combinations(axes.values(), 2):
        met = {(one(cell), other(cell)) for cell, _ in USUAL}
        assert met == set(product({one(cell) for cell in CELLS}, {other(cell) for cell in CELLS}))
    assert len(USUAL) + len(REST) == len(CELLS) * len(SOUND)


def test_the_plain_outputs_end_in_every_way(reference: Reference) -> None:
    """Or the runs above show less than they claim."""
    pairs = zip(reference.jobs, reference.outputs, strict=True)
    ends = {job.kind: output.outputs[0] for job, output in pairs}
    for kind in ("stop ids", "min tokens"):
        assert isinstance(ends[kind].stop_reason, int)
    for kind in ("stop text", "stop text, shown"):
        assert isinstance(ends[kind].stop_reason, str)
        # More tokens would follow, so a run of drafts goes on behind the stop.
        assert len(ends[kind].token_ids) < 20
    assert ends["to the end"].finish_reason == "length"
    plain = Reference(reference.model, ("greedy",))
    for job in reference.jobs:
        if "bad" in job.kind:
            free = Job(job.kind, job.ids, SamplingParams(**without_words(job.params)))
            (output,) = generate(plain.llm, [free])
            assert list(output.outputs[0].token_ids) != list(ends[job.kind].token_ids)


def without_words(params: SamplingParams) -> dict[str, Any]:
    names = ("temperature", "seed", "max_tokens", "ignore_eos", "allowed_token_ids")
    return {name: getattr(params, name) for name in names}


# ---- proposers that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("name", FAILING)
def test_a_proposer_that_fails_gives_one_warning_and_plain_decoding(
    name: str, overlaps: bool, reference: Reference, caplog: pytest.LogCaptureFixture
) -> None:
    config = reference.config(name)
    with caplog.at_level(logging.WARNING):
        counters = check(reference, Cell(7, "off", "ample", overlaps), config)
    (warning,) = [each.message for each in caplog.records if WARNING in each.message]
    assert "\n" not in warning
    assert 0 < counters.num_accepted_tokens < 150
    assert config["method"].num_calls == 6  # five answers that were right, and one that failed


# ---- other models ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            FAMILIES[family].write(made[family])
        return made[family]

    return of


BITWISE = [
    ("llama", "float32", Cell(7, "radix", "recompute", True), "mostly right"),
    ("llama", "bfloat16", Cell(0, "off", "swap", False), "ngram"),
    ("mistral", "bfloat16", Cell(7, "off", "ample", False), "mostly right"),
    ("mistral", "float32", Cell(0, "hash", "swap", True), "some rows"),
    ("deepseek_v2", "float32", Cell(7, "hash", "ample", True), "right"),
    ("deepseek_v2", "bfloat16", Cell(7, "off", "recompute", False), "anything"),
    ("qwen3_moe", "bfloat16", Cell(0, "off", "swap", False), "mostly right"),
    ("qwen3_moe", "float32", Cell(0, "radix", "recompute", True), "right"),
]


@pytest.mark.parametrize(
    ("family", "dtype", "cell", "proposer"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] if place % 2 else [])
        for place, each in enumerate(BITWISE)
    ],
)
def test_in_deterministic_mode_every_bit_is_the_same(
    family: str, dtype: str, cell: Cell, proposer: str, tiny_of: Callable[[str], Path]
) -> None:
    # Attention of several kinds, experts; cells and proposers take turns.
    few = ("drawn", "penalties", "min-p", "logprobs, drawn", "prompt logprobs", "three", "stop ids")
    kinds = few if cell.pool == "ample" else WITHOUT_TEXT
    reference = Reference(tiny_of(family), kinds, deterministic=True, dtype=dtype)
    counters = check(reference, cell, reference.config(proposer), exact=True)
    assert counters.num_draft_tokens > 50


@pytest.mark.parametrize(
    ("family", "cell", "proposer"),
    [
        ("mistral", Cell(7, "radix", "ample", True), "mostly right"),
        ("deepseek_v2", Cell(0, "hash", "swap", False), "mostly right"),
        ("qwen3_moe", Cell(7, "off", "recompute", True), "mostly right"),
    ],
)
def test_other_families(
    family: str, cell: Cell, proposer: str, tiny_of: Callable[[str], Path]
) -> None:
    reference = Reference(tiny_of(family), WITHOUT_TEXT)
    counters = check(reference, cell, reference.config(proposer))
    assert counters.num_accepted_tokens > 100


# ---- rows that draft beside rows that do not ---------------------------------------------------


def test_rows_with_and_without_drafts_in_one_step(reference: Reference) -> None:
    llm = open_cell(reference, Cell(7, "off", "ample", False), reference.config("some rows"))
    assert not reference.differences(run_cell(reference, llm))
    both = [
        record
        for record in llm.trace
        if len({each.num_drafted > 0 for each in record.drafted}) == 2 and record.num_prefill_tokens
    ]
    assert len(both) > 3  # and a prompt's chunk beside them


def test_graphs_replay_the_steps_that_have_no_drafts(folder: Path, reference: Reference) -> None:
    """A sequence goes from a graph, which leaves its last token on the device, to a step with
    drafts and back."""
    right = Right(reference.known, error=0.3)
    config = {
        "method": Now(lambda rows, call: right.propose(rows) if call % 3 else [[] for _ in rows]),
        "num_speculative_tokens": K,
    }
    for overlaps in (False, True):
        llm = open_cell(reference, Cell(0, "off", "ample", overlaps), config)
        give_graphs(llm)
        assert not reference.differences(run_cell(reference, llm))
        assert sum(record.graph_rows > 0 for record in llm.trace) > 5
        assert llm.engine.scheduler.counters.num_accepted_tokens > 100


def test_too_many_running_sequences_draft_nothing(reference: Reference) -> None:
    config = reference.config("right") | {"disable_by_batch_size": 3}
    llm = open_cell(reference, Cell(0, "off", "ample", False), config)
    assert not reference.differences(run_cell(reference, llm))
    drafting = [record for record in llm.trace if record.drafted]
    assert drafting
    assert all(record.num_running <= 3 for record in drafting)


@pytest.mark.parametrize("k", [1, 15])
@pytest.mark.parametrize("overlaps", [False, True])
def test_other_numbers_of_drafts(k: int, overlaps: bool, reference: Reference) -> None:
    config = reference.config("mostly right") | {"num_speculative_tokens": k}
    counters = check(reference, Cell(7, "radix", "recompute", overlaps), config)
    assert len(counters.num_accepted_at) == k


# ---- the end of a context, and of a request ----------------------------------------------------


@pytest.mark.parametrize("left", range(1, 2 * K + 1))
def test_up_to_the_last_position_of_the_context(left: int, folder: Path) -> None:
    """Nothing is computed at or behind the last position, whatever is drafted."""
    ids = [i % 50 for i in range(24 - left)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    fields: dict[str, Any] = {"max_model_len": 24, "num_gpu_blocks_override": 6}
    (plain,) = make(folder, **fields).generate([ids], params, use_tqdm=False)
    seen: list[int] = []

    def answer(rows: Any, _: int) -> list[list[int]]:
        seen.extend(len(row.token_ids) + row.num_drafts for row in rows)
        (row,) = rows
        return [list(plain.outputs[0].token_ids)[len(row.token_ids) - len(ids) :]]

    config = {"method": Now(answer), "num_speculative_tokens": K}
    llm = make(folder, speculative_config=config, **fields)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert tokens(output) == tokens(plain)
    assert len(tokens(output)[0]) == left
    assert max(seen, default=0) <= 23  # the token at position 23 is the last, and is not drafted
    assert_idle(llm.engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_abort_in_the_middle_leaves_the_others_as_they_were(
    overlaps: bool, reference: Reference
) -> None:
    """Requests are aborted while their drafts are verified, and others take their rows at once.

    A long prompt beside them lets steps be planned ahead, so that drafts are in flight between two
    calls of `step`. What they come to is nothing to the sequence that has the row by then.
    """
    llm = open_cell(reference, Cell(1, "off", "ample", overlaps), reference.config("right"))
    engine, by_kind = llm.engine, {job.kind: job for job in reference.jobs}
    victims = ("drawn", "greedy", "penalties", "repetition", "bad words")
    heirs = ("logprobs, drawn", "penalties", "three", "bad words, drawn", "repetition")
    for turn, (victim, heir) in enumerate(zip(victims, heirs, strict=True)):
        old, new = by_kind[victim], by_kind[heir]
        first = engine.add(engine.make_request(f"old {turn}", None, old.ids, old.params))
        beside = engine.add(engine.make_request(f"beside {turn}", None, old.ids, old.params))
        while not first.completions[0].token_ids:
            engine.step()
        engine.add(engine.make_scoring_request(f"long {turn}", list(range(90))))
        while len(first.completions[0].token_ids) < 7 or (
            overlaps and not is_verifying(llm, first.sequences[0].seq_id)
        ):
            assert not first.finished
            engine.step()
        engine.abort(f"old {turn}")
        live = engine.add(engine.make_request(f"new {turn}", None, new.ids, new.params))
        while engine.has_work:
            engine.step()
        assert not reference.differences([beside.output(), live.output()], [old, new])
        assert_idle(engine)


def is_verifying(llm: LLM, seq_id: int) -> bool:
    """Whether a step that is launched has drafts of a sequence."""
    rows = [row for step in llm.engine._steps for row in step.plan.rows]
    return any(row.seq_id == seq_id and row.num_logits > 1 for row in rows)


# ---- the embedded model ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "proposer", ["ngram", pytest.param("mostly right", marks=pytest.mark.slow)]
)
def test_the_embedded_model(proposer: str) -> None:
    kinds = ("greedy", "min-p", "repetition", "bad words, drawn", "logprobs", "stop text")
    reference = Reference("tiny", kinds)
    counters = check(reference, Cell(7, "radix", "ample", True), reference.config(proposer))
    assert counters.num_accepted_tokens > 10


def test_a_copying_prompt_needs_few_steps(folder: Path) -> None:
    """A greedy text that repeats itself is drafted by n-grams, and takes a third of the steps."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logit_bias={9: 40.0})
    plain, drafted = (
        LLM(folder, **fields_of({"dtype": "float32", "block_size": 4, "speculative_config": each}))
        for each in (
            None,
            {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 2},
        )
    )
    outputs = [llm.generate([[5, 6, 7]], params, use_tqdm=False) for llm in (plain, drafted)]
    assert tokens(outputs[0][0]) == tokens(outputs[1][0]) == [[9] * 40]
    steps = [llm.engine.scheduler.counters.num_steps for llm in (plain, drafted)]
    assert steps[1] < steps[0] / 3
