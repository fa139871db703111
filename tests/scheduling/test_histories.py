"""Thousands of histories of a scheduler, its block pool and both prefix indices, all promises kept.

See `machine.py` for the rules and the promises. Hypothesis chooses some of the histories, because
it shrinks what fails; seeded random numbers choose most, because they cost less. A part of both
runs here, all of them in `make test-full`.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from minillm.scheduling.policies import POLICIES
from tests.pairs import part_and_rest
from tests.scheduling.machine import (
    CROWD_EVENTS,
    EVENTS,
    IMPOSSIBLE,
    MIN_STEPS,
    SETUPS,
    SPECS,
    SchedulerMachine,
    Setup,
    Spec,
    World,
    random_history,
)

NUM_HISTORIES = 2000  # a part of them runs in `make test`
RULES = ("add", "follow_up", "crowd", "step", "step_with", "abort", "finish", "impossible", "drain")

# What must have happened in all histories, and how often at least, or they show less than they
# claim. Fewer histories must have shown as much in proportion.
SEEN = {
    **{f"rule {name}": 100 for name in RULES},
    **{f"refused: {kind}": 50 for kind in IMPOSSIBLE},
    **{f"blocked: {what}": 100 for what in ("batch slots", "tokens", "blocks")},
    **{f"ended: {how}": 100 for how in ("length", "computed", "aborted", "finished", "failed")},
    **{f"re-ordered by {name}": 10 for name in POLICIES if name != "fcfs"},
    "preempted: recompute": 100,
    "preempted: swap": 100,
    "swapped in": 100,
    "host memory is full": 20,
    "resumed from a prefix": 100,
    "copies": 1000,
    "revived": 1000,
    "evicted": 1000,
    "partial reuse": 500,
    "forks": 1000,
    "mixed steps": 1000,
    "chunks": 1000,
    "stalled": 100,
    "aborted in flight": 500,
    "read in its step": 1000,
    "broken rows": 1000,
    "void rows": 50,
    "finished in flight": 500,
    "report: evicted": 100,
    "report: salt": 100,
    "report: last_token": 100,
}
SEEN_WHEN_SHRINKING = {  # in so many examples
    50: (
        *(f"rule {name}" for name in RULES),
        *("preempted: recompute", "copies", "revived", "forks", "partial reuse"),
    ),
    300: ("preempted: swap",),  # which is rarer; the seeded histories always have some
}


@pytest.mark.parametrize("seeds", part_and_rest(range(100), NUM_HISTORIES))
def test_seeded_histories(seeds: range) -> None:
    coverage: Counter[str] = Counter()
    for seed in seeds:
        try:
            world = random_history(seed, coverage)
        except Exception as error:
            error.add_note(f"history {seed}")
            raise
        assert world.num_steps >= MIN_STEPS
    assert coverage["histories"] == len(seeds)
    least = {name: count * len(seeds) / NUM_HISTORIES for name, count in SEEN.items()}
    missing = {name: coverage[name] for name in least if coverage[name] < least[name]}
    assert not missing, coverage
    assert not coverage["re-ordered by fcfs"]


@pytest.mark.parametrize("count", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_histories_that_shrink(count: int) -> None:
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
    coverage = SchedulerMachine.coverage
    assert coverage["histories"] >= count
    assert sum(coverage[f"rule {name}"] for name in RULES) >= MIN_STEPS * coverage["histories"]
    names = [
        name for least, names in SEEN_WHEN_SHRINKING.items() if count >= least for name in names
    ]
    assert not [name for name in names if not coverage[name]], coverage


def simplest(table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: values[0] for name, values in table.items()}


def test_a_preempted_fork_counts_no_prefix_hits() -> None:
    """Found by these histories: the second completion of a request had no report of its own, so
    what it found again after a preemption counted as a hit, and its prompt a second time."""
    setup = Setup(**{**simplest(SETUPS), "prefix_cache": "hash", "capacity": 24, "max_num_seqs": 2})
    world = World(setup, Counter())
    world.add(Spec(**{**simplest(SPECS), "length": 8, "n": 2, "max_tokens": 12}))
    world.close()
    counters = world.scheduler.counters
    assert counters.num_preemptions_recompute > 0
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (8, 0)


def test_events_are_all_known() -> None:
    """A misspelt event would do nothing, and pass."""
    assert set(EVENTS) | set(CROWD_EVENTS) == {"abort", "finish", "fail", "break", None}
