"""As many plans in flight as a pipeline has stages, case by case."""

from typing import Any

import pytest

from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.scheduling import ahead
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import StepPlan
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler


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


def test_chunks_of_a_prompt_follow_each_other() -> None:
    """Issue B13 of the notes: no stage waits for the token of a chunk that makes none."""
    scheduler = scheduler_of(4)
    scheduler.add(request("a", 64, 2))
    assert run(scheduler, 1) == [[{0}, {0}, {0}, {0}]]
    assert scheduler.sequences[0].num_committed == 16


def test_all_have_their_turns_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one plan at a time all still have their turns."""
    monkeypatch.setattr(ahead, "has_room", lambda *_: False)
    scheduler = scheduler_of(2)
    for name in "abcd":
        scheduler.add(request(name, 2, 50))
    steps = run(scheduler, 9)
    assert [plans for plans in steps[1:]] == [[{0, 1}], [{2, 3}]] * 4
