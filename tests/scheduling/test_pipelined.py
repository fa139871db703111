"""Histories in which as many plans are in flight as a pipeline has stages.

The rules and the promises are those of `machine.py` and `test_ahead.py`. The oracle learns a token
when its step is committed, as the first stage does: a plan that needs one earlier fails.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from minillm.api.sampling_params import SamplingParams
from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.scheduling import pipelined
from minillm.scheduling import scheduler as scheduler_file
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from tests.pairs import part_and_rest
from tests.scheduling import machine
from tests.scheduling.machine import Before, Setup, random_history
from tests.scheduling.oracle import Broken, require
from tests.scheduling.test_ahead import AheadWorld

NUM_HISTORIES = 120  # of each kind; a part of them runs in `make test`
SEEN = {  # in all of them, at least; a part must have shown as much in proportion
    "planned ahead": 1_000,
    "as many as stages": 200,
    "chunks in a row": 100,
    "ended: length": 200,
    "ended: aborted": 20,
    "ended: failed": 10,
    "forks": 50,
    "preempted: recompute": 10,
    "preempted: swap": 10,
    "aborted in flight": 20,
}


class StagesWorld(AheadWorld):
    """Two to four plans in flight."""

    def __init__(self, setup: Setup, coverage: Counter[str]):
        super().__init__(setup, coverage)
        learn = self.append
        self.append = lambda *_: None  # not from its own stage
        self.runner.append = lambda seq_id, token: (  # at the commit, if it is known still
            learn(seq_id, token) if seq_id in self.runner.rows else None
        )
        self.num_stages = 2 + setup.capacity % 7 % 3
        config = replace(setup.config(), num_stages=self.num_stages)
        self.scheduler = Scheduler(config, self.manager)
        self.waited: Counter[int] = Counter()  # plans without a row of a sequence that decodes

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
        while (following := self.scheduler.schedule_ahead()) is not None:
            self.runner.hear(following, self.scheduler.sequences)
            self._expect(following, event, which)
            self._check_ahead(following)
            self._check_apart(following)
            self._launch(following)
        require(len(self.under_way) <= self.num_stages, "limits", "more plans than stages")
        self.coverage["as many as stages"] += len(self.under_way) == self.num_stages
        self._check_books()
        self._land(event, which, early)

    def _check_apart(self, plan: StepPlan) -> None:
        """A sequence is in one plan, but for the chunks of its prompt."""
        for other in self.under_way:
            sampling = {row.seq_id for row in other.rows if row.num_logits}
            for row in plan.rows:
                require(row.seq_id not in sampling, "order", "its token is not known", row)
        chunks = {row.seq_id for other in self.under_way for row in other.rows}
        self.coverage["chunks in a row"] += any(row.seq_id in chunks for row in plan.rows)

    def _check_decode(self, before: Before, rows: Mapping[int, Row]) -> None:
        """A decoding sequence has its turn after the others, unless memory is short."""
        record = self.scheduler.record
        if record.preempted or record.stalled:
            self.waited.clear()
        for seq_id, left in before.uncomputed.items():
            if seq_id in rows or left != 1 or seq_id not in self.scheduler.sequences:
                self.waited.pop(seq_id, None)
                continue
            self.waited[seq_id] += 1
            most = 2 * self.num_stages + 2
            require(self.waited[seq_id] <= most, "decode", f"{seq_id} waits for its turn")


class LateStagesWorld(StagesWorld):
    """Slow stages."""

    late = True


WORLDS = StagesWorld, LateStagesWorld


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("seeds", part_and_rest(range(60), NUM_HISTORIES))
def test_seeded_histories(
    seeds: range, world: type[StagesWorld], monkeypatch: pytest.MonkeyPatch
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


# ---- broken on purpose ---------------------------------------------------------------------------


def a_token_that_is_not_known(patch: pytest.MonkeyPatch) -> None:
    """As if the device had it, which is another stage's: the look ahead of one stage."""

    def look(flights: Any, running: Any, blocks: Any, config: Any, drafts: Any = None) -> bool:
        for row, sequence in pipelined.rows_in_flight(flights):
            sequence.num_computed = row.start + row.num_tokens
            sequence.num_pending = row.num_logits
        return 0 < len(flights.plans) < config.num_stages and bool(running)

    patch.setattr(scheduler_file, "prepare_ahead", look)


def memory_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipelined, "has_room", lambda *_: True)


def the_first_always_go_first(patch: pytest.MonkeyPatch) -> None:
    one = SchedulerConfig()
    patch.setattr(
        scheduler_file,
        "scheduling_order",
        lambda running, config: pipelined.scheduling_order(running, one),
    )
    patch.setattr(pipelined, "has_room", lambda *_: False)


def all_in_one_plan(patch: pytest.MonkeyPatch) -> None:
    """Issue B12 of the notes: the other stages have nothing to do."""
    patch.setattr(scheduler_file, "most_decoding", lambda num_running, config: num_running)


def chunks_wait(patch: pytest.MonkeyPatch) -> None:
    """Issue B13 of the notes: a stage waits for a token that a chunk does not make."""
    patch.setattr(pipelined, "is_predictable", lambda row, sequence: False)


BREAKS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    each.__name__: each
    for each in (
        a_token_that_is_not_known,
        memory_is_not_counted,
        the_first_always_go_first,
        all_in_one_plan,
        chunks_wait,
    )
}


def everything(patch: pytest.MonkeyPatch) -> None:
    """The tests of this file, in short."""
    test_stages_have_work_while_there_are_sequences(3)
    test_chunks_of_a_prompt_follow_each_other()
    for world in WORLDS:
        patch.setattr(machine, "World", world)
        for seed in range(60):
            random_history(seed, Counter())
    test_all_have_their_turns_where_memory_is_short(patch)


@pytest.mark.mutation
@pytest.mark.parametrize("name", BREAKS)
def test_a_planted_bug_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BREAKS[name](monkeypatch)
    with pytest.raises((Broken, AccountingError, AssertionError, IndexError)):
        everything(monkeypatch)


# ---- single cases --------------------------------------------------------------------------------


def scheduler_of(num_stages: int, num_blocks: int = 64, **fields: Any) -> Scheduler:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 16} | fields
    config = SchedulerConfig(**limits, num_stages=num_stages)
    return Scheduler(config, BlockManager(num_blocks, 4, None))


def request(name: str, length: int, max_tokens: int) -> Request:
    return Request(name, tuple(range(length)), SamplingParams(), max_tokens)


def run(scheduler: Scheduler, num_steps: int) -> list[list[set[int]]]:
    """Steps of an engine: for each, the sequences of the plans in flight before a commit."""
    plans: list[StepPlan] = []
    found = []
    for _ in range(num_steps):
        if not plans:
            plans.append(scheduler.schedule())
        while (plan := scheduler.schedule_ahead()) is not None:
            plans.append(plan)
        found.append([{row.seq_id for row in plan.rows} for plan in plans])
        oldest = plans.pop(0)
        sampled: dict[int, list[int | None]] = {
            row.seq_id: [1] for row in oldest.rows if row.num_logits
        }
        scheduler.commit(oldest, sampled)
    return found


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_have_work_while_there_are_sequences(num_stages: int) -> None:
    """Issue B12 of the notes: p plans in flight with p sequences or more, each with its share."""
    scheduler = scheduler_of(num_stages)
    for name in "abcdefg":
        scheduler.add(request(name, 2, 50))
    steps = run(scheduler, 40)[2 * num_stages :]
    assert all(len(plans) == num_stages for plans in steps)
    share = -(-7 // num_stages)
    assert all(len(plan) <= share for plans in steps for plan in plans)
    assert all(len(set.union(*plans)) == 7 for plans in steps)


def test_one_sequence_is_in_one_plan() -> None:
    """Four stages, one user: three wait."""
    scheduler = scheduler_of(4)
    scheduler.add(request("a", 2, 20))
    assert all(plans == [{0}] for plans in run(scheduler, 19))


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """Issue B13 of the notes: no stage waits for the token of a chunk that makes none."""
    scheduler = scheduler_of(4)
    scheduler.add(request("a", 64, 2))
    assert run(scheduler, 1) == [[{0}, {0}, {0}, {0}]]
    assert scheduler.sequences[0].num_committed == 16


def test_all_have_their_turns_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one plan at a time all still have their turns."""
    monkeypatch.setattr(pipelined, "has_room", lambda *_: False)
    scheduler = scheduler_of(2)
    for name in "abcd":
        scheduler.add(request(name, 2, 50))
    steps = run(scheduler, 9)
    assert [plans for plans in steps[1:]] == [[{0, 1}], [{2, 3}]] * 4
