"""Histories in which each step is planned before the one before it is committed.

The rules and the promises are those of `machine.py`. What is different is when a plan is carried
out: at once, as early as a device may be, or as late as possible, after the next plan was made. The
oracle keeps its own tokens, as a device does, and every plan can only use those.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from minillm.api.sampling_params import SamplingParams
from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.scheduling import ahead
from minillm.scheduling.ahead import UncommittedPlans
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.invariants import check_invariants
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.request import Request, Sequence
from minillm.scheduling.scheduler import Scheduler
from tests.pairs import part_and_rest
from tests.scheduling import machine
from tests.scheduling.machine import SchedulerMachine, Setup, World, name_of, random_history
from tests.scheduling.oracle import VOCABULARY, Broken, Sample, require

NUM_HISTORIES = 500  # of each kind; a part of them runs in `make test`
SEEN = {  # in all of them, at least; a part must have shown as much in proportion
    "planned ahead": 5_000,
    "rows in vain": 300,
    "ended: length": 1_000,
    "ended: aborted": 100,
    "ended: finished": 100,
    "ended: failed": 50,
    "forks": 300,
    "preempted: recompute": 50,
    "preempted: swap": 50,
    "copies": 100,
    "partial reuse": 100,
    "aborted in flight": 100,
}


class AheadWorld(World):
    """The same, one plan ahead wherever the scheduler lets it be."""

    late = False  # whether a plan is carried out when its tokens are asked for, and not at once

    def __init__(self, setup: Setup, coverage: Counter[str]):
        super().__init__(setup, coverage)
        self.under_way: list[StepPlan] = []
        self.done: dict[int, dict[int, list[Sample]]] = {}
        self.drafted: dict[int, dict[int, int]] = {}
        self.append = self.runner.append
        self.runner.append = lambda *_: None  # not at the commit: it has its tokens already

    def step(self) -> None:
        while self.under_way and not self.scheduler.has_work:
            super().step()  # rows of sequences that have ended
        super().step()

    def _step(self, event: str | None, which: int, early: bool) -> None:
        had_work = self.scheduler.has_work
        self.num_steps += had_work
        if not self.under_way:
            before = self._before()
            plan = self.scheduler.schedule()
            self.runner.hear(plan, self.scheduler.sequences)
            self._expect(plan, event, which)
            self._check_plan(before, plan, had_work)
            self._cover(before, plan)
            self._launch(plan)
        following = self.scheduler.schedule_ahead()
        if following is not None:
            self.runner.hear(following, self.scheduler.sequences)
            self._expect(following, event, which)
            self._check_ahead(following)
            self._launch(following)
        self._check_books()
        self._land(event, which, early)

    def _land(self, event: str | None, which: int, early: bool) -> None:
        """The oldest plan is carried out and committed."""
        plan = self.under_way.pop(0)
        if early:
            self._interrupt(event, which, plan)
        self._carry_out(plan)
        if not early:
            self._interrupt(event, which, plan)
        samples = self.done.pop(plan.step)
        sampled = {
            seq_id: [drawn.fingerprint % VOCABULARY for drawn in several]
            for seq_id, several in samples.items()
        }
        failed = {}
        if event == "fail" and samples:
            seq_id = list(samples)[which % len(samples)]
            failed = {seq_id: which % len(samples[seq_id])}
        self._commit(plan, samples, sampled, failed)
        if event == "cut":
            self._cut(plan, which)

    def _launch(self, plan: StepPlan) -> None:
        self.under_way.append(plan)
        if not self.late:
            self._carry_out(plan)

    def _carry_out(self, plan: StepPlan) -> None:
        if plan.step in self.done:
            return
        samples = self.done[plan.step] = self._execute(plan)
        self.drafted[plan.step] = dict(self.runner.num_drafted)
        forks = {row.seq_id for row in plan.rows if row.num_forks}
        for seq_id, drawn in samples.items():
            for sample in drawn[:1] if seq_id in forks else drawn:
                self.append(seq_id, sample.fingerprint % VOCABULARY)

    def _num_drafted(self, plan: StepPlan) -> dict[int, int]:
        return self.drafted.pop(plan.step)

    def _check_ahead(self, plan: StepPlan) -> None:
        record = self.scheduler.record
        self.coverage["planned ahead"] += 1
        require(plan.rows, "progress", "an empty plan", record)
        require(not record.preempted and not plan.swap_out, "order", "preempted ahead", record)
        self._check_limits({row.seq_id: row for row in plan.rows})
        for row in plan.rows:
            void = self.scheduler.sequences[row.seq_id].is_void
            require(not void, "order", "a void sequence is planned ahead", row)
            if row.seq_id in record.admitted:
                self.furthest[row.seq_id] = max(self.furthest.get(row.seq_id, 0), row.start)
            most = self.scheduler.sequences[row.seq_id].request.max_computed
            require(row.start + row.num_tokens <= most, "limits", "beyond the last token", row)

    def _commit(
        self,
        plan: StepPlan,
        samples: Mapping[int, list[Sample]],
        sampled: dict[int, list[int]],
        failed: Mapping[int, int],
    ) -> None:
        gone = [row for row in plan.rows if row.seq_id not in self.scheduler.sequences]
        self.coverage["rows in vain"] += len(gone)
        super()._commit(plan, samples, sampled, failed)

    def _poison(self) -> None:
        if not self.late:  # else a copy may still have to read what its plan gave away
            super()._poison()

    def _check_commit(self) -> None:
        """Sequences hold the blocks of the plan that is under way, too."""
        for sequence in self.scheduler.sequences.values():
            completion = self.completions[name_of(sequence)]
            right = [*completion.request.prompt_token_ids, *completion.outputs]
            require(sequence.token_ids == right, "oracle", "tokens of", sequence.seq_id)
            self.furthest.setdefault(sequence.seq_id, sequence.num_computed)  # of a fork
        counted = self.scheduler.counters.num_recomputed_tokens
        require(counted == self.num_recomputed, "counters", counted, self.num_recomputed)


class LateWorld(AheadWorld):
    """A slow device."""

    late = True


@pytest.mark.parametrize("world", [AheadWorld, LateWorld])
@pytest.mark.parametrize("seeds", part_and_rest(range(80), NUM_HISTORIES))
def test_seeded_histories(
    seeds: range, world: type[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "World", world)
    coverage: Counter[str] = Counter()
    for seed in seeds:
        try:
            random_history(seed, coverage)
        except Exception as error:
            error.add_note(f"history {seed}")
            raise
    least = {name: count * len(seeds) / NUM_HISTORIES for name, count in SEEN.items()}
    missing = {name: coverage[name] for name in least if coverage[name] < least[name]}
    assert not missing, coverage


@pytest.mark.parametrize("world", [AheadWorld, LateWorld])
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_histories_that_shrink(
    count: int, world: type[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "World", world)
    SchedulerMachine.coverage.clear()
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert SchedulerMachine.coverage["planned ahead"] > 10 * count


# ---- broken on purpose ---------------------------------------------------------------------------


def blocks_are_free_while_a_plan_writes(patch: pytest.MonkeyPatch) -> None:
    leave = UncommittedPlans.remove_row

    def left(self: UncommittedPlans, seq_id: int) -> Sequence:
        sequence = self.sequences[seq_id]
        sequence.num_in_flight = 1
        sequence = leave(self, seq_id)
        return self.sequences.setdefault(seq_id, sequence) if len(self.plans) else sequence

    patch.setattr(UncommittedPlans, "remove_row", left)


def memory_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ahead, "has_room", lambda *_: True)


def the_last_token_is_computed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ahead, "end_of", lambda sequence: 10**9)


def a_refusal_leaves_the_plan_as_carried_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ahead, "has_room", lambda *_: False)
    advance = Sequence.advance

    def too_far(self: Sequence, start: int, end: int) -> int:
        return advance(self, start, end + (self.num_computed == start))

    patch.setattr(Sequence, "advance", too_far)


def tokens_stay_pending(patch: pytest.MonkeyPatch) -> None:
    advance = Sequence.advance

    def advanced(self: Sequence, start: int, end: int) -> int:
        pending = self.num_pending
        again = advance(self, start, end)
        self.num_pending = pending
        return again

    patch.setattr(Sequence, "advance", advanced)


def void_sequences_give_up_blocks_that_a_plan_uses(patch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def at_once(self: Scheduler, plan: StepPlan, *results: Any) -> list[Sequence]:
        for sequence in self.in_flight.values():
            if sequence.is_void:
                self.blocks.release(sequence.table)
        return commit(self, plan, *results)

    patch.setattr(Scheduler, "commit", at_once)


BREAKS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each
    for each in (
        blocks_are_free_while_a_plan_writes,
        memory_is_not_counted,
        the_last_token_is_computed,
        a_refusal_leaves_the_plan_as_carried_out,
        tokens_stay_pending,
        void_sequences_give_up_blocks_that_a_plan_uses,
    )
}


def histories(patch: pytest.MonkeyPatch) -> None:
    """Some of each kind."""
    for world in (AheadWorld, LateWorld):
        patch.setattr(machine, "World", world)
        for seed in range(40):
            random_history(seed, Counter())


@pytest.mark.mutation
@pytest.mark.parametrize("name", BREAKS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[name](monkeypatch)
    with pytest.raises((Broken, AccountingError, AssertionError, KeyError, IndexError)):
        histories(monkeypatch)


# ---- single cases --------------------------------------------------------------------------------


def scheduler_of(num_blocks: int = 8, **fields: Any) -> Scheduler:
    config = SchedulerConfig(**({"max_num_seqs": 4, "max_num_batched_tokens": 16} | fields))
    return Scheduler(config, BlockManager(num_blocks, 4, "hash"))


def request(name: str, length: int, max_tokens: int, n: int = 1) -> Request:
    return Request(name, tuple(range(length)), SamplingParams(n=n), max_tokens)


def test_who_ended_has_a_row_in_vain_and_keeps_its_blocks_until_then() -> None:
    scheduler = scheduler_of()
    first = scheduler.add(request("a", 3, 9))
    plan = scheduler.schedule()
    after = scheduler.schedule_ahead()
    assert after is not None
    assert [(row.start, row.num_tokens, row.num_samples) for row in after.rows] == [(3, 1, 1)]
    scheduler.commit(plan, {first.seq_id: [7]})
    assert first.token_ids == [0, 1, 2, 7]
    scheduler.finish(first.seq_id)
    assert scheduler.blocks.pool.num_free == 7
    (ended,) = scheduler.record.ended
    assert (ended.discarded, ended.num_tokens) == (True, 1)
    scheduler.commit(after, {first.seq_id: [8]})
    assert first.token_ids == [0, 1, 2, 7]
    assert scheduler.blocks.pool.num_free == 8
    assert not scheduler.in_flight


def test_its_end_has_the_time_of_the_tokens_that_ended_it() -> None:
    scheduler = scheduler_of()
    short, long = scheduler.add(request("a", 3, 2)), scheduler.add(request("b", 3, 9))
    plans = [scheduler.schedule()]
    for step in range(2):
        record = scheduler.record
        plans.append(scheduler.schedule_ahead())
        record.computed = 10.0 + step
        sampled = {row.seq_id: [1] for row in plans[step].rows}
        scheduler.commit(plans[step], sampled)
    (ended,) = scheduler.record.ended
    assert (ended.seq_id, ended.time, ended.discarded) == (short.seq_id, 11.0, False)
    assert [row.seq_id for row in plans[2].rows] == [long.seq_id]


@pytest.mark.parametrize("why", ["forks", "no room", "all end", "recomputes"])
def test_what_must_be_waited_for(why: str) -> None:
    scheduler = scheduler_of(num_blocks=2 if why == "no room" else 8)
    if why == "no room":
        scheduler.add(request("a", 4, 4))
        scheduler.add(request("b", 4, 4))
    else:
        scheduler.add(request("a", 3, 1 if why == "all end" else 5, 2 if why == "forks" else 1))
    plan = scheduler.schedule()
    assert plan.rows
    sequences = list(scheduler.in_flight.values())
    if why == "recomputes":
        sequences[0].furthest = 2
    books = [(one.num_computed, one.num_tokens) for one in sequences]
    assert scheduler.schedule_ahead() is None
    assert books == [(one.num_computed, one.num_tokens) for one in sequences]
    assert scheduler.record.step == plan.step


def test_plans_are_committed_in_order() -> None:
    scheduler = scheduler_of()
    first = scheduler.add(request("a", 3, 9))
    plan = scheduler.schedule()
    after = scheduler.schedule_ahead()
    assert scheduler.schedule_ahead() is None
    with pytest.raises(AccountingError, match="order"):
        scheduler.commit(after, {first.seq_id: [7]})
    with pytest.raises(AccountingError, match="not committed"):
        scheduler.schedule()
    scheduler.commit(plan, {first.seq_id: [7]})
    with pytest.raises(AccountingError, match="order"):
        scheduler.commit(plan, {first.seq_id: [7]})


def test_a_plan_made_ahead_leaves_out_only_the_rows_that_must_wait() -> None:
    """Three completions part from one request: the other request goes on meanwhile."""
    scheduler = scheduler_of()
    parent, other = scheduler.add(request("a", 3, 5, n=3)), scheduler.add(request("b", 3, 9))
    plan = scheduler.schedule()
    assert [(row.num_logits, row.num_forks) for row in plan.rows] == [(1, 2), (1, 0)]
    after = scheduler.schedule_ahead()
    assert after is not None
    assert [row.seq_id for row in after.rows] == [other.seq_id]
    forks = scheduler.commit(plan, {parent.seq_id: [7, 8, 9], other.seq_id: [7]})
    assert [fork.token_ids[-1] for fork in forks] == [8, 9]
    check_invariants(scheduler)
    scheduler.commit(after, {other.seq_id: [7]})
    check_invariants(scheduler)
    assert {row.seq_id for row in scheduler.schedule().rows} == set(scheduler.sequences)


# ---- several logits per row ----------------------------------------------------------------------


def drafted(scheduler: Scheduler, num_drafts: int) -> tuple[StepPlan, Sequence]:
    """A plan that computes the last token of a sequence and some drafts behind it; no proposer
    exists yet, so the row of a usual plan is widened by hand."""
    sequence = scheduler.add(request("a", 3, 30))
    scheduler.commit(scheduler.schedule(), {sequence.seq_id: [7]})
    plan = scheduler.schedule()
    (row,) = plan.rows
    blocks = scheduler.blocks
    blocks.grow(sequence.table, row.start, row.start + 1 + num_drafts)
    sequence.num_sent = len(sequence.table.blocks)
    plan.rows[0] = row._replace(
        num_tokens=1 + num_drafts,
        num_logits=1 + num_drafts,
        blocks=tuple(sequence.table.blocks[row.num_kept :]),
    )
    return plan, sequence


@pytest.mark.parametrize("num_accepted", range(1, 7))
def test_accepted_tokens_are_appended_and_rejected_positions_are_not_certain(num_accepted) -> None:
    scheduler = scheduler_of()
    plan, sequence = drafted(scheduler, num_drafts=5)
    accepted = list(range(20, 20 + num_accepted))
    scheduler.commit(plan, {sequence.seq_id: accepted})
    assert sequence.token_ids == [0, 1, 2, 7, *accepted]
    # Position 3 holds the token 7; each accepted token but the last was a draft, and is computed.
    assert sequence.num_committed == sequence.num_computed == 3 + num_accepted
    assert len(scheduler.blocks.index) == (3 + num_accepted) // 4
    check_invariants(scheduler)
    found = scheduler.blocks.match([0, 1, 2, 7, *accepted, 99], 99, "")
    assert found.num_tokens == (3 + num_accepted) // 4 * 4
    (row,) = scheduler.schedule().rows
    assert (row.start, row.num_tokens, row.num_logits) == (3 + num_accepted, 1, 1)


def test_a_row_with_drafts_is_not_planned_ahead() -> None:
    scheduler = scheduler_of()
    plan, sequence = drafted(scheduler, num_drafts=2)
    other = scheduler.add(request("b", 3, 9))
    assert scheduler.schedule_ahead() is None  # only the drafted sequence runs
    scheduler.commit(plan, {sequence.seq_id: [5, 6, 7]})
    assert {row.seq_id for row in scheduler.schedule().rows} == {sequence.seq_id, other.seq_id}


def test_no_more_tokens_than_there_is_room_for() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("a", 3, 3))
    scheduler.commit(scheduler.schedule(), {sequence.seq_id: [7]})
    plan = scheduler.schedule()
    plan.rows[0] = plan.rows[0]._replace(num_logits=4)
    scheduler.commit(plan, {sequence.seq_id: [8, 9, 10, 11]})
    assert sequence.token_ids == [0, 1, 2, 7, 8, 9]
    assert not scheduler.has_work
