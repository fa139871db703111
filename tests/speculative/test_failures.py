"""Verification where the model's logits are not finite, and where a proposer answers badly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM
from tests.engine.small import assert_idle, write_model
from tests.speculative.cells import Cell, Job, Reference, generate, open_cell, run_cell

NOW, AHEAD = Cell(0, "off", "ample", False), Cell(0, "off", "ample", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


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


def test_rejected_positions_may_be_nan(reference: Reference) -> None:
    """Nothing is drawn from them, so nothing fails, and nothing cached is doubted."""
    llm = open_cell(reference, Cell(7, "radix", "ample", False), reference.config("wrong"))
    counts, scheduler = poison(llm, later_ones), llm.engine.scheduler
    doubts: list[Any] = []
    scheduler.invalidate = lambda plan, suspect: doubts.append(suspect)  # type: ignore[method-assign]
    assert not reference.differences(run_cell(reference, llm))
    assert not doubts
    assert sum(counts) > 500


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("after", range(1, 8))
def test_nan_ends_a_run_where_it_ends_plain_decoding(
    after: int, overlaps: bool, reference: Reference
) -> None:
    """The tokens before it stay, whichever draft of a row it meets."""
    jobs = [job for job in reference.jobs if job.kind in ("drawn", "penalties", "logprobs")]
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

    cell = AHEAD if overlaps else NOW
    plain = run(open_cell(reference, cell, None))
    assert all(len(tokens) == after and reason == "error" for tokens, reason, _ in plain)
    llm = open_cell(reference, cell, reference.config("right"))
    assert run(llm) == plain
    assert len(ends) > 1
    assert llm.engine.scheduler.counters.num_accepted_tokens >= max(after - 2, 0)


@pytest.mark.parametrize("kind", ["stop text", "stop text, shown", "stop ids"])
def test_nan_behind_a_stop_is_never_met(kind: str, reference: Reference) -> None:
    """An accepted run goes on behind the end of its text: what is there concerns nobody."""
    index = next(i for i, job in enumerate(reference.jobs) if job.kind == kind)
    job: Job = reference.jobs[index]
    num_tokens = len(reference.outputs[index].outputs[0].token_ids)
    # So many drafts that the first run of them goes on behind the end.
    config = reference.config("right") | {"num_speculative_tokens": 15}
    llm = open_cell(reference, NOW, config)
    counts = poison(
        llm, lambda rows, at: [i for i, p in enumerate(at) if p == len(job.ids) + num_tokens]
    )
    outputs = generate(llm, [job])
    assert not reference.differences(outputs, [job])
    (ended,) = [ended for record in llm.trace for ended in record.ended]
    assert (ended.reason, ended.num_tokens) == ("stop", num_tokens)
    assert sum(counts) == 1
    assert_idle(llm.engine)
