"""Policies: whom they prefer, and how often anybody can be overtaken.

An overtake is a later arrival that is admitted first. Bounds are those that `policies.py` states;
each is approached by the worst stream of arrivals, so that a looser policy would break it.
"""

import random

import pytest

from minillm.api.arguments import CACHE_POLICIES
from minillm.api.sampling_params import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.scheduling.admission import MAX_REPEATED_REFUSALS
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.policies import POLICIES, WINDOW, Policy, reserve_max, watermark
from minillm.scheduling.request import Request, Sequence
from minillm.scheduling.scheduler import Scheduler

PREFIX = tuple(range(160))  # ten places of 16 tokens


class Line:
    """A scheduler that serves one request per step, and the order in which it did."""

    def __init__(self, policy: str | Policy, cache: str | None = None):
        named = policy if isinstance(policy, str) else "fcfs"
        config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=4096, policy=named)
        own = None if isinstance(policy, str) else policy
        self.scheduler = Scheduler(config, BlockManager(1024, 4, cache), own)
        self.admitted: list[int] = []  # arrivals, in the order of service

    def add(self, prompt: tuple[int, ...], priority: int = 0, max_tokens: int = 1) -> Sequence:
        name = str(self.scheduler._num_arrivals)
        return self.scheduler.add(
            Request(name, prompt, SamplingParams(), max_tokens, priority=priority, arrival=0.0)
        )

    def step(self) -> None:
        plan = self.scheduler.schedule()
        self.admitted += self.scheduler.record.admitted
        self.scheduler.commit(plan, {row.seq_id: [0] for row in plan.rows})

    def drain(self) -> list[int]:
        while self.scheduler.has_work:
            self.step()
        return self.admitted

    def overtakes(self, arrival: int) -> int:
        """Later arrivals that were served before this one (all so far, if it still waits)."""
        place = self.admitted.index(arrival) if arrival in self.admitted else None
        return sum(other > arrival for other in self.admitted[:place])


def prompt(length: int, first: int = 10_000) -> tuple[int, ...]:
    return tuple(range(first, first + length))


def test_priority_serves_the_lowest_number_first_and_equals_in_order() -> None:
    line = Line("priority")
    for value in (2, 0, 1, 0, -5):
        line.add(prompt(4), priority=value)
    assert line.drain() == [4, 1, 3, 2, 0]


def test_shortest_prefill_first_puts_a_prompt_back_one_place_per_16_tokens() -> None:
    line = Line("shortest_prefill_first")
    for length in (160, 1, 16, 48, 1):  # keys 10, 1 + 1/16, 3, 6, 4 + 1/16
        line.add(prompt(length))
    assert line.drain() == [1, 2, 4, 3, 0]


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_longest_prefix_match_serves_cached_prompts_before_they_are_evicted(cache: str) -> None:
    line = Line("longest_prefix_match", cache)
    line.add(PREFIX)
    line.drain()
    line.add(prompt(20))
    line.add((*PREFIX[:32], 5))  # two places forward: 2 - 2 = 0 < 1
    line.add((*PREFIX[:16], 5))  # one place forward: 3 - 1 = 2
    assert line.drain()[1:] == [2, 1, 3]


def test_longest_prefix_match_looks_at_a_window_of_the_oldest() -> None:
    """What it costs must not grow with the line."""
    line = Line("longest_prefix_match", "hash")
    line.add(PREFIX)
    line.drain()
    looked = []
    admission = line.scheduler.admission
    match = admission.match
    admission.match = lambda sequence: looked.append(sequence.arrival) or match(sequence)
    for _ in range(WINDOW + 50):
        line.add(prompt(8))
    line.step()
    assert looked == [*range(1, WINDOW + 1), 1]  # and once more when the first is admitted
    assert line.admitted == [0, 1]


def test_longest_prefix_match_looks_at_nobody_while_all_seats_are_taken() -> None:
    line = Line("longest_prefix_match", "hash")
    line.add(PREFIX, max_tokens=5)
    line.step()  # the only seat is taken
    line.add(prompt(8))
    line.scheduler.admission.match = None  # to call it would fail
    line.scheduler.schedule()
    assert str(line.scheduler.record.blocked) == "no batch slots: needs 1, has 0"


def test_longest_prefix_match_does_not_look_again_while_no_blocks_come_free() -> None:
    """128 long prompts looked up in vain in every step would slow down those who run."""
    config = SchedulerConfig(max_num_seqs=4, policy="longest_prefix_match", watermark=0)
    scheduler = Scheduler(config, BlockManager(8, 4, "hash"))
    looked = []
    match = scheduler.admission.match
    scheduler.admission.match = lambda sequence: looked.append(sequence.arrival) or match(sequence)
    for index, (length, max_tokens) in enumerate([(4, 8), (30, 2), (24, 2), (8, 2)]):
        params = SamplingParams()
        scheduler.add(Request(str(index), prompt(length, 100 * index), params, max_tokens))
    seen = []
    while "1" in scheduler._requests:
        looked.clear()
        plan = scheduler.schedule()
        scheduler.commit(plan, {row.seq_id: [0] * row.num_samples for row in plan.rows})
        seen.append(looked[:])
    # The second needs all eight blocks. The first runs alone for eight steps, and nobody is looked
    # at until it ends; but for the step in which another is the oldest than before.
    assert seen[0] == [0, 1, 2, 3, 0, 1]
    assert seen[1] == [1, 2, 3, 1]
    assert seen[2:8] == [[]] * 6
    assert seen[8] == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("policy", ["fcfs", "longest_prefix_match"])
def test_who_lacks_blocks_is_looked_at_again_after_a_while(policy: str) -> None:
    """Others may have cached its prefix meanwhile, which costs no blocks."""
    config = SchedulerConfig(max_num_seqs=4, policy=policy, watermark=0)
    scheduler = Scheduler(config, BlockManager(8, 8, "hash"))
    looked = []
    match = scheduler.admission.match
    scheduler.admission.match = lambda sequence: looked.append(1) or match(sequence)
    for index, (length, max_tokens) in enumerate([(4, 56), (60, 2)]):
        name, tokens = str(index), prompt(length, 100 * index)
        scheduler.add(Request(name, tokens, SamplingParams(), max_tokens))
    seen = []
    for _ in range(2 * MAX_REPEATED_REFUSALS + 6):
        looked.clear()
        plan = scheduler.schedule()
        scheduler.commit(plan, {row.seq_id: [0] * row.num_samples for row in plan.rows})
        assert scheduler.record.blocked.what == "blocks"
        seen.append(bool(looked))
    often = range(1, len(seen), MAX_REPEATED_REFUSALS + 1)  # the oldest is another in step 1
    assert [step for step, look in enumerate(seen) if look] == [0, *often]


def test_the_arguments_know_which_policies_read_the_cache() -> None:
    assert {name for name, each in POLICIES.items() if each.reads_cache} == {*CACHE_POLICIES}


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if each.bound])
@pytest.mark.parametrize("seed", range(5))
def test_the_bounds_hold_for_everybody_in_random_streams(policy: str, seed: int) -> None:
    line, rng = Line(policy, "radix"), random.Random(seed)
    bound, longest = POLICIES[policy].bound, 160
    assert bound is not None
    for _ in range(150):
        length = rng.choice([1, 8, 40, longest])
        line.add(PREFIX[:length] if rng.random() < 0.5 else prompt(length, rng.randint(0, 999)))
        if rng.random() < 0.6:
            line.step()
    line.drain()
    assert sorted(line.admitted) == list(range(150))
    overtakes = [line.overtakes(arrival) for arrival in range(150)]
    assert min(bound(longest), 1) <= max(overtakes) <= bound(longest)


def test_priority_has_no_bound() -> None:
    """Urgent requests keep others out for as long as they come."""
    line = Line("priority")
    patient = line.add(prompt(4), priority=1)
    for _ in range(500):
        line.add(prompt(4), priority=0)
        line.step()
    assert line.overtakes(patient.arrival) == 500
    assert patient.arrival not in line.admitted
    assert line.drain()[-1] == patient.arrival  # once they stop, it is served


def test_a_policy_of_ones_own_is_a_function() -> None:
    def longest_first(request: Request, arrival: int, num_cached: int) -> tuple[float, ...]:
        return (-len(request.prompt_token_ids),)  # equals: the scheduler adds the order of arrival

    line = Line(Policy(longest_first))
    for length in (3, 30, 7, 30):
        line.add(prompt(length))
    assert line.drain() == [1, 3, 2, 0]


def sequence_of(length: int, max_tokens: int, n: int) -> Sequence:
    request = Request("a", prompt(length), SamplingParams(n=n), max_tokens)
    return Sequence(0, request, 0, 0, (0,))


@pytest.mark.parametrize(
    ("length", "max_tokens", "n", "now", "ever"),
    [
        (8, 1, 1, 2, 2),  # the last new token needs no place
        (8, 2, 1, 2, 3),
        (9, 8, 1, 3, 4),
        (8, 9, 3, 4, 2 + 3 * 2),  # the full blocks of the prompt are shared
        (9, 8, 3, 5, 2 + 3 * 2),  # its last one is copied
    ],
)
def test_blocks_that_admission_asks_for(length, max_tokens, n, now, ever):
    sequence = sequence_of(length, max_tokens, n)
    assert (watermark(sequence, 4), reserve_max(sequence, 4)) == (now, ever)
