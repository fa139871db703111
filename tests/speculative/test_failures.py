"""Verification where the model's logits are not finite, and where a proposer answers badly."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.sampling.masks import StructuredOutputs
from tests.engine.small import assert_idle
from tests.matrix.cells import Cell, config_for, open_cell, reference_of, run_cell
from tests.matrix.jobs import generate


def poison(llm: LLM, where: Callable[[list[int], list[int]], list[int]]) -> list[int]:
    """Logits are NaN at the places that `where` gives for rows and positions; returns how many
    there were, in a list that grows."""
    sampler = llm.engine.runner.sampler
    choose, counts = sampler.choose, []

    def poisoned(logits: Any, rows: Any, positions: Any, *rest: Any) -> Any:
        places = where(list(rows), list(positions))
        counts.append(len(places))
        logits = logits.clone()
        logits[places] = torch.nan
        return choose(logits, rows, positions, *rest)

    sampler.choose = poisoned
    return counts


def later_ones(rows: list[int], positions: list[int]) -> list[int]:
    """All logits of a row but its first."""
    return [i for i in range(1, len(rows)) if rows[i] == rows[i - 1]]


def test_rejected_positions_may_be_nan() -> None:
    """Nothing is drawn from them, so nothing fails, and nothing cached is doubted."""
    cell = Cell(chunk=7, cache="radix", drafts="wrong")
    reference, llm = reference_of(cell), open_cell(cell)
    edits, scheduler = llm.engine.runner.sampler.edits.edits, llm.engine.scheduler
    (forced,) = (each.rows for each in edits if isinstance(each, StructuredOutputs))

    def rejected(rows: list[int], positions: list[int]) -> list[int]:
        """What a constraint forces is drafted rightly."""
        later = later_ones(rows, positions)
        return [i for i in later if rows[i] not in forced]

    counts = poison(llm, rejected)
    doubts: list[Any] = []
    scheduler.invalidate = lambda plan, suspect: doubts.append(suspect)  # type: ignore[method-assign]
    assert not reference.differences(run_cell(llm, reference))
    assert not doubts
    assert sum(counts) > 500


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("after", range(1, 8))
def test_nan_ends_a_run_where_it_ends_plain_decoding(after: int, overlaps: bool) -> None:
    """The tokens before it stay, whichever draft of a row it meets."""
    cell = Cell(overlaps=overlaps)
    jobs = [
        job for job in reference_of(cell).jobs if job.kind in ("drawn", "penalties", "logprobs")
    ]
    ends = {len(job.ids) + after for job in jobs}

    def run(llm: LLM) -> list[Any]:
        outputs = []
        for job in jobs:  # alone, so that a position names its request
            end = len(job.ids) + after
            sampler = llm.engine.runner.sampler
            before = sampler.choose
            poison(llm, lambda rows, at, end=end: [i for i, p in enumerate(at) if p == end])
            (output,) = generate(llm, [job])
            sampler.choose = before
            outputs += [(list(x.token_ids), x.finish_reason, x.error) for x in output.outputs]
        assert_idle(llm.engine)
        return outputs

    plain = run(open_cell(cell))
    assert all(len(tokens) == after and reason == "error" for tokens, reason, _ in plain)
    llm = open_cell(replace(cell, drafts="right"))
    assert run(llm) == plain
    assert len(ends) > 1
    assert llm.engine.scheduler.counters.num_accepted_tokens >= max(after - 2, 0)


@pytest.mark.parametrize("kind", ["stop text", "stop text, shown", "stop ids"])
def test_nan_behind_a_stop_is_never_met(kind: str) -> None:
    """An accepted run goes on behind the end of its text: what is there concerns nobody."""
    cell = Cell(drafts="right")
    reference = reference_of(cell)
    job, num_tokens = reference.job(kind), len(reference.outputs[kind].outputs[0].token_ids)
    # So many drafts that the first run of them goes on behind the end.
    llm = open_cell(cell, config_for(cell) | {"num_speculative_tokens": 15})
    counts = poison(
        llm, lambda rows, at: [i for i, p in enumerate(at) if p == len(job.ids) + num_tokens]
    )
    outputs = generate(llm, [job])
    assert not reference.differences(outputs, [job])
    (ended,) = [ended for record in llm.trace for ended in record.ended]
    assert (ended.reason, ended.num_tokens) == ("stop", num_tokens)
    assert sum(counts) == 1
    assert_idle(llm.engine)
