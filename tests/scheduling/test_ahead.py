"""Single cases of planning ahead and of rows with drafts; `test_histories.py` has the histories."""

from typing import Any

import pytest

from minillm.api.sampling_params import SamplingParams
from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler
from tests.scheduling.invariants import check_invariants


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


def test_no_more_tokens_than_there_is_room_for() -> None:
    scheduler = scheduler_of()
    sequence = scheduler.add(request("a", 3, 3))
    scheduler.commit(scheduler.schedule(), {sequence.seq_id: [7]})
    plan = scheduler.schedule()
    plan.rows[0] = plan.rows[0]._replace(num_logits=4)
    scheduler.commit(plan, {sequence.seq_id: [8, 9, 10, 11]})
    assert sequence.token_ids == [0, 1, 2, 7, 8, 9]
    assert not scheduler.has_work


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
