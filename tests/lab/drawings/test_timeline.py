"""The data of a drawing says in each step what the records and the block pool say."""

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from minillm import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.lab.drawings.timeline import BEHIND, NOT_YET, timeline
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from minillm.trace.recorder import Trace
from tests.engine.small import num_ahead
from tests.trace.drafts import Truth, speculating
from tests.trace.workload import BLOCKS, HOST_GIB, engine, run


class Recorded:
    """A trace, its drawing, and the reference counts of the pool after every step."""

    def __init__(self, folder: Path, seed: int, capacity: int | None = None, **arguments: Any):
        with engine(folder, **arguments) as llm:
            if capacity is not None:
                llm.engine.trace = Trace(llm.trace.settings, capacity)
            self.counts: dict[int, list[int]] = {}

            def look() -> None:
                if llm.trace:
                    pool = llm.engine.scheduler.blocks.pool
                    self.counts[llm.trace[-1].step] = list(pool.ref_counts)

            run(llm, seed, 50, after_step=look)
            self.trace = llm.trace
        self.data = timeline(self.trace)
        self.spans = [
            (sequence, *span) for sequence in self.data["sequences"] for span in sequence["spans"]
        ]


@pytest.fixture(scope="module", params=["recompute", "swap", "dropped", "drafts"])
def recorded(folder: Path, request: pytest.FixtureRequest) -> Recorded:
    swap = {"swap_space": HOST_GIB, "prefix_cache": "radix"} if request.param == "swap" else {}
    capacity = 50_000 if request.param == "dropped" else None
    drafts = speculating(Truth(folder, 0.2)) if request.param == "drafts" else {}
    return Recorded(folder, 3, capacity, **swap, **drafts)


def test_the_spans_of_a_sequence_have_no_gaps(recorded: Recorded) -> None:
    last_column = len(recorded.trace) - 1
    for sequence in recorded.data["sequences"]:
        spans = sequence["spans"]
        assert spans, sequence
        assert spans[0][1] == sequence["added"]
        for one, other in pairwise(spans):
            assert one[1] <= one[2] == other[1] - 1
        end = last_column if sequence["ended"] is None else sequence["ended"]
        assert spans[-1][2] == end


def test_tokens_and_lines_of_each_step_are_those_of_its_record(recorded: Recorded) -> None:
    forked = {  # in its first column a fork shows what the first completion computed for it
        (sequence["id"], sequence["added"])
        for sequence in recorded.data["sequences"]
        if sequence["parent"] is not None and sequence["added"]
    }
    decode, prefill, again = Counter[int](), Counter[int](), Counter[int]()
    waiting, running = Counter[int](), Counter[int]()
    for sequence, kind, first, last, *values in recorded.spans:
        for column in range(first, last + 1):
            if (sequence["id"], column) in forked:
                continue
            if kind == "d":
                decode[column] += 1
            elif kind in "pr":
                prefill[column] += values[1]
                again[column] += kind == "r"
            (waiting if kind in "wxo" else running)[column] += 1
    for column, record in enumerate(recorded.trace):
        total = record.num_prefill_tokens + record.num_decode_tokens
        assert decode[column] + prefill[column] == total
        assert decode[column] <= record.num_decode_tokens  # one that is computed again is "r"
        assert bool(again[column]) == bool(record.num_recomputed_tokens) or record.ended
        assert running[column] == len(record.rows) + len(record.stalled)
        gone = sum(one.seq_id not in {row.seq_id for row in record.rows} for one in record.ended)
        assert record.num_waiting <= waiting[column] <= record.num_waiting + gone
    steps = recorded.data["steps"]
    assert steps["prefill"] == [record.num_prefill_tokens for record in recorded.trace]
    assert steps["free"] == [record.num_free_blocks for record in recorded.trace]
    assert all(len(steps[name]) == len(recorded.trace) for name in steps if name != "blocked")


def test_drafts_and_positions_are_those_of_the_rows(recorded: Recorded) -> None:
    drawn = {
        (sequence["id"], column): counts
        for sequence in recorded.data["sequences"]
        for column, *counts in sequence["drafts"]
    }
    spans = [(sequence["id"], *span) for sequence, *span in recorded.spans]
    starts = {
        (seq_id, column): position + column - first
        for seq_id, kind, first, last, position, *_ in spans
        if kind == "d"
        for column in range(first, last + 1)
    }
    for column, record in enumerate(recorded.trace):
        for one in record.drafted:
            counts = drawn.pop((one.seq_id, column), [0, 0])
            assert counts == [one.num_drafted, one.num_accepted]
        for row in record.rows:
            assert starts.get((row.seq_id, column), row.start) == row.start
        steps = recorded.data["steps"]
        assert steps["drafted"][column] == sum(one.num_drafted for one in record.drafted)
        assert steps["accepted"][column] == sum(one.num_accepted for one in record.drafted)
    assert not drawn
    assert any(s["drafts"] for s in recorded.data["sequences"]) == any(
        record.drafted for record in recorded.trace
    )


def test_a_step_that_was_planned_too_early_for_a_sequence_stalls_it(folder: Path) -> None:
    """It has drafts, so that its next row follows its tokens; the other one goes on."""
    with engine(folder, async_scheduling=True, **speculating(Truth(folder))) as llm:
        core = llm.engine
        for name, count in (("a", 16), ("b", 1)):  # one token: never any drafts
            params = SamplingParams(max_tokens=count, seed=1, ignore_eos=True)
            prompt = [1, 2, 3] if name == "a" else list(range(40))
            core.add(core.make_request(name, None, prompt, params))
        while core.has_work:
            core.step()
        assert num_ahead(llm)
        data, records = timeline(llm.trace), list(llm.trace)
    (line,) = (s for s in data["sequences"] if s["name"] == "a")
    idle = {
        column
        for kind, first, last, reason, *_ in line["spans"]
        for column in range(first, last + 1)
        if kind == "s" and data["reasons"][reason] == NOT_YET
    }
    rows = {c for c, record in enumerate(records) if any(row.seq_id == 0 for row in record.rows)}
    assert idle
    assert idle == set(range(max(rows))) - rows


def test_each_block_is_held_by_as_many_as_the_pool_counts(recorded: Recorded) -> None:
    held = [0] * BLOCKS
    changes: dict[int, list[tuple[int, list[int]]]] = {}
    for block, line in enumerate(recorded.data["blocks"]):
        for column, holders in line:
            changes.setdefault(column, []).append((block, holders))
    shared = 0
    for column, record in enumerate(recorded.trace):
        for block, holders in changes.get(column, ()):
            held[block] = len(holders)
            assert len(set(holders)) == len(holders)
        assert held == recorded.counts[record.step]
        shared += max(held) > 1
    assert shared, "no block was ever shared"


def test_reasons_are_those_of_the_records(recorded: Recorded) -> None:
    data = recorded.data
    named = {sequence["id"]: sequence for sequence in data["sequences"]}
    refused = {}
    for first, last, place, reason in data["steps"]["blocked"]:
        for column in range(first, last + 1):
            refused[column] = (data["sequences"][place]["id"], data["reasons"][reason])
    for column, record in enumerate(recorded.trace):
        if record.blocked is not None:
            assert refused.pop(column) == (record.blocked.seq_id, str(record.blocked))
        for one in record.preempted:
            (span,) = [s for s in named[one.seq_id]["spans"] if s[1] <= column <= s[2]]
            assert span[0] == ("o" if one.mode == "swap" else "x")
            assert data["reasons"][span[3]] == f"preempted for {named[one.for_seq_id]['name']}"
        for one in record.stalled:
            (span,) = [s for s in named[one.seq_id]["spans"] if s[1] <= column <= s[2]]
            assert (span[0], data["reasons"][span[3]]) == ("s", str(one))
    assert not refused
    assert BEHIND in data["reasons"]


def test_a_reason_of_its_own_holds_for_its_step_only(recorded: Recorded) -> None:
    for sequence, kind, first, last, reason, *_ in recorded.spans:
        if kind not in "wxo" or recorded.data["reasons"][reason] == BEHIND:
            continue
        for column in range(first, last + 1):
            record = recorded.trace[column]
            refused = record.blocked is not None and record.blocked.seq_id == sequence["id"]
            preempted = sequence["id"] in {one.seq_id for one in record.preempted}
            assert refused or preempted, (sequence["name"], column)


def test_ends_and_preemptions_are_told(recorded: Recorded) -> None:
    ends = {one.seq_id: (column, one.reason) for column, record in enumerate(recorded.trace)
            for one in record.ended}  # fmt: skip
    counts = Counter(one.seq_id for record in recorded.trace for one in record.preempted)
    before = {s.seq_id: s.num_preemptions for s in recorded.trace.snapshot()[0].sequences.values()}
    for sequence in recorded.data["sequences"]:
        assert (sequence["ended"], sequence["end"]) == ends.get(sequence["id"], (None, None))
        here = counts[sequence["id"]] + before.get(sequence["id"], 0)
        assert sequence["preemptions"] == here


def test_the_size_grows_with_what_changes_not_with_who_waits() -> None:
    """Thousands who wait for thousands of steps are a span each."""
    scheduler, trace = Scheduler(SchedulerConfig(max_num_seqs=2), BlockManager(64, 16)), Trace()
    for number in range(200):
        params = SamplingParams(max_tokens=50)
        scheduler.add(Request(f"r{number}", tuple(range(8)), params, 50, arrival=0.0))
    for _ in range(40):
        plan = scheduler.schedule()
        trace.append(scheduler.record)
        scheduler.commit(plan, {row.seq_id: [1] * row.num_samples for row in plan.rows})
    data = timeline(trace)
    assert sum(len(sequence["spans"]) for sequence in data["sequences"]) < 2 * 40 + 2 * 200
    assert len(data["reasons"]) < 10
    assert data["meta"]["model"] is None


def test_an_empty_trace_is_an_empty_drawing() -> None:
    data = timeline(Trace())
    assert (data["sequences"], data["blocks"], data["steps"]["step"]) == ([], [], [])
    assert Trace().table().splitlines()[0].endswith("events")
    assert [event["ph"] for event in Trace().chrome_events()] == ["M"] * 3
