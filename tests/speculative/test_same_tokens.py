"""Drafts change no token: proposers that fail, mixed steps, the end of a context, and aborts.

That each proposer changes no token in any engine is in `tests/matrix`.
"""

import logging
from itertools import product
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from tests.engine.small import assert_idle, make, tokens
from tests.matrix.cells import (
    Cell,
    check,
    config_for,
    folder_of,
    give_graphs,
    open_cell,
    reference_of,
    run_cell,
)
from tests.matrix.proposers import FAILING, K, Now, Right
from tests.pairs import one_in, some

WARNING = "Speculative decoding is off from now on"


@pytest.mark.parametrize(("overlaps", "name"), one_in(2, product([False, True], FAILING)))
def test_a_proposer_that_fails_gives_one_warning_and_plain_decoding(name, overlaps, caplog) -> None:
    cell = Cell(chunk=7, overlaps=overlaps, drafts=name)
    config = config_for(cell)
    with caplog.at_level(logging.WARNING):
        llm = check(cell, config)
    (warning,) = [each.message for each in caplog.records if WARNING in each.message]
    assert "\n" not in warning
    assert 0 < llm.engine.scheduler.counters.num_accepted_tokens < 150
    assert config["method"].num_calls == 6  # five answers that were right, and one that failed


def test_rows_with_and_without_drafts_in_one_step() -> None:
    llm = check(Cell(chunk=7, drafts="some rows"))
    both = [
        record
        for record in llm.trace
        if len({each.num_drafted > 0 for each in record.drafted}) == 2 and record.num_prefill_tokens
    ]
    assert len(both) > 3  # and a prompt's chunk beside them


def test_graphs_replay_the_steps_that_have_no_drafts() -> None:
    """A sequence goes from a graph, which leaves its last token on the device, to a step with
    drafts and back."""
    reference = reference_of(Cell())
    right = Right(reference.known, error=0.3)
    config = {
        "method": Now(lambda rows, call: right.propose(rows) if call % 3 else [[] for _ in rows]),
        "num_speculative_tokens": K,
    }
    for overlaps in (False, True):
        llm = open_cell(Cell(overlaps=overlaps), config)
        give_graphs(llm)
        assert not reference.differences(run_cell(llm, reference))
        assert sum(record.graph_rows > 0 for record in llm.trace) > 5
        assert llm.engine.scheduler.counters.num_accepted_tokens > 100


def test_too_many_running_sequences_draft_nothing() -> None:
    cell = Cell(drafts="right")
    llm = check(cell, config_for(cell) | {"disable_by_batch_size": 3})
    drafting = [record for record in llm.trace if record.drafted]
    assert drafting
    assert all(record.num_running <= 3 for record in drafting)


@pytest.mark.parametrize(("k", "overlaps"), one_in(3, product([1, 15], [False, True])))
def test_other_numbers_of_drafts(k: int, overlaps: bool) -> None:
    cell = Cell("bytes", chunk=7, cache="radix", pool="recompute", overlaps=overlaps,
                drafts="mostly right")  # fmt: skip
    llm = check(cell, config_for(cell) | {"num_speculative_tokens": k})
    assert len(llm.engine.scheduler.counters.num_accepted_at) == k


# ---- the end of a context, and of a request ----------------------------------------------------


@pytest.mark.parametrize("left", range(1, 2 * K + 1))
def test_up_to_the_last_position_of_the_context(left: int) -> None:
    """Nothing is computed at or behind the last position, whatever is drafted."""
    ids = [i % 50 for i in range(24 - left)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    fields: dict[str, Any] = {"max_model_len": 24, "num_gpu_blocks_override": 6}
    (plain,) = make(folder_of("bytes"), **fields).generate([ids], params, use_tqdm=False)
    seen: list[int] = []

    def answer(rows: Any, _: int) -> list[list[int]]:
        seen.extend(len(row.token_ids) + row.num_drafts for row in rows)
        (row,) = rows
        return [list(plain.outputs[0].token_ids)[len(row.token_ids) - len(ids) :]]

    config = {"method": Now(answer), "num_speculative_tokens": K}
    llm = make(folder_of("bytes"), speculative_config=config, **fields)
    (output,) = llm.generate([ids], params, use_tqdm=False)
    assert tokens(output) == tokens(plain)
    assert len(tokens(output)[0]) == left
    assert max(seen, default=0) <= 23  # the token at position 23 is the last, and is not drafted
    assert_idle(llm.engine)


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_abort_in_the_middle_leaves_the_others_as_they_were(overlaps: bool) -> None:
    """Requests are aborted while their drafts are verified, and others take their rows at once.

    A long prompt beside them lets steps be planned ahead, so that drafts are in flight between two
    calls of `step`. What they come to is nothing to the sequence that has the row by then.
    """
    cell = Cell(chunk=1, overlaps=overlaps, drafts="right")
    reference, llm = reference_of(cell), open_cell(cell)
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


QUICK = Cell("embedded", chunk=7, cache="radix", overlaps=True, drafts="ngram")
EMBEDDED = (
    QUICK,
    Cell("embedded", chunk=32, cache="hash", drafts="mostly right"),
    Cell("embedded", pool="recompute", graphs=True, overlaps=True),
    Cell("embedded", path="operations", chunk=1, cache="hash", pool="recompute"),
)


@pytest.mark.parametrize("cell", some([QUICK], EMBEDDED), ids=str)
def test_the_embedded_model(cell: Cell) -> None:
    check(cell)
