"""Histories with drafts: the promises of `machine.py` hold whatever is guessed, also planned ahead.

Most guesses are right, so that accepted drafts fill blocks, and many are wrong, so that rejected
ones lie in memory as garbage. A part of the histories runs here, all of them in `make test-full`.
"""

from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from minillm.scheduling.drafts import Drafts
from minillm.scheduling.scheduler import Scheduler
from tests.pairs import part_and_rest
from tests.scheduling import machine
from tests.scheduling.drafting import DRAFTS, drafting
from tests.scheduling.machine import (
    DRAFT_EVENTS,
    EVENTS,
    MIN_STEPS,
    SETUPS,
    SchedulerMachine,
    Setup,
    World,
    drawn,
    random_history,
)
from tests.scheduling.test_ahead import AheadWorld, LateWorld, request, scheduler_of

SEEN = {  # in each 250 histories, at least
    "rows with drafts": 3000,
    "nothing drafted": 500,
    "fewer drafts than planned": 200,
    "drafts cut short": 1000,
    "drafts beside a prefill": 500,
    "all accepted": 1000,
    "some accepted": 200,
    "all rejected": 1000,
    "preempted after drafts: recompute": 30,
    "preempted after drafts: swap": 10,
    "planned twice": 2000,
    "cut": 10,
}


def run_histories(seeds: range, seen: dict[str, int]) -> Counter[str]:
    coverage: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = random_history(seed, coverage, **drafting(seed))
        except Exception as error:
            error.add_note(f"history {seed}")
            raise
        assert world.num_steps >= MIN_STEPS
    least = {name: count * len(seeds) // 250 for name, count in seen.items()}
    missing = {name: coverage[name] for name in least if coverage[name] < least[name]}
    assert not missing, coverage
    return coverage


@pytest.mark.parametrize("seeds", part_and_rest(range(40), 2000))
def test_seeded_histories(seeds: range) -> None:
    run_histories(seeds, SEEN)


@pytest.mark.parametrize("world", [AheadWorld, LateWorld])
@pytest.mark.parametrize("seeds", part_and_rest(range(20), 500))
def test_histories_planned_ahead(
    seeds: range, world: type[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "World", world)
    seen = {name: count // 2 for name, count in SEEN.items() if name != "planned twice"}
    run_histories(seeds, seen | {"planned ahead": 2500})


class DraftingMachine(SchedulerMachine):
    """The same, by Hypothesis."""

    @initialize(setup=drawn(Setup, {**SETUPS, **DRAFTS}))
    def begin(self, setup: Setup) -> None:
        self.world = World(setup, self.coverage)


@pytest.mark.parametrize("count", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_histories_that_shrink(count: int) -> None:
    SchedulerMachine.coverage.clear()
    run_state_machine_as_test(
        DraftingMachine,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    coverage = DraftingMachine.coverage
    assert coverage["histories"] >= count
    # What is rare is up to Hypothesis; the seeded histories above must have met it.
    common = [name for name, count in SEEN.items() if count >= 200]
    assert not [name for name in common if not coverage[name]], coverage
    assert set(DRAFT_EVENTS) == {*EVENTS, "cut"}


# ---- single cases --------------------------------------------------------------------------------


def drafting_scheduler(num_drafts: int = 4, num_blocks: int = 8, **fields: int) -> Scheduler:
    scheduler = scheduler_of(num_blocks, **fields)
    scheduler.drafts = Drafts(num_drafts)
    return scheduler


def test_a_draft_that_was_right_counts_where_the_token_after_it_fails() -> None:
    """Found by these histories: it counted as the row's own token."""
    scheduler = drafting_scheduler()
    sequence = scheduler.add(request("a", 3, 30))
    scheduler.commit(scheduler.schedule(), {sequence.seq_id: [7]})
    plan = scheduler.schedule()
    assert [(row.num_tokens, row.num_logits) for row in plan.rows] == [(5, 5)]
    scheduler.commit(plan, {sequence.seq_id: [20, None]}, {sequence.seq_id: 4})
    (drafted,) = scheduler.record.drafted
    assert (drafted.num_drafted, drafted.num_accepted) == (4, 1)
    assert scheduler.counters.num_accepted_at == [1, 0, 0, 0]
    (ended,) = scheduler.record.ended
    assert (ended.reason, ended.num_tokens) == ("error", 2)
    assert scheduler.blocks.pool.num_free == 8


@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_as_many_drafts_as_there_are_tokens_to_come_less_one(max_tokens: int) -> None:
    """The last token is never computed, so nothing is drafted at its position."""
    scheduler = drafting_scheduler(num_drafts=5)
    sequence = scheduler.add(request("a", 3, max_tokens))
    scheduler.commit(scheduler.schedule(), {sequence.seq_id: [7]})
    if max_tokens == 1:
        assert not scheduler.has_work
        return
    (row,) = scheduler.schedule().rows
    assert row.num_logits == row.num_tokens == 1 + min(max_tokens - 2, 5)


@pytest.mark.parametrize(("num_blocks", "lengths"), [(2, [1, 1]), (3, [4, 1]), (4, [4, 3])])
def test_drafts_take_the_blocks_and_the_tokens_that_are_left(
    num_blocks: int, lengths: list[int]
) -> None:
    """Of 7 tokens of the budget 5 are left, three drafts come before the last token, and each
    sequence has filled a block."""
    scheduler = drafting_scheduler(num_blocks=num_blocks, max_num_batched_tokens=7)
    sequences = [scheduler.add(request(name, 3, 5)) for name in "ab"]
    scheduler.commit(scheduler.schedule(), {one.seq_id: [7] for one in sequences})
    plan = scheduler.schedule()
    rows = {row.seq_id: row.num_tokens for row in plan.rows}
    assert [rows[one.seq_id] for one in sequences] == lengths
    scheduler.commit(plan, {one.seq_id: [7] for one in sequences}, {})
    assert scheduler.blocks.pool.num_free == num_blocks - 2
