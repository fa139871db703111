"""Thousands of histories of a scheduler, its block pool and both prefix indices, all promises kept.

See `machine.py` for the rules and the promises, `worlds.py` for plans in flight, `drafting.py` for
drafts, most of which are right, so that accepted ones fill blocks, and many wrong, so that rejected
ones lie in memory as garbage. Hypothesis chooses some of the histories, because it shrinks what
fails; seeded random numbers choose most, because they cost less. `make test` runs a part of both.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import initialize, run_state_machine_as_test

from minillm.cache.hash_chain import HashChain
from minillm.scheduling.policies import POLICIES
from tests.pairs import part_and_rest
from tests.scheduling import machine
from tests.scheduling.drafting import DRAFTS, drafting
from tests.scheduling.machine import MIN_STEPS, SETUPS, SchedulerMachine, Setup, World
from tests.scheduling.worlds import AheadWorld, LateStagesWorld, LateWorld, StagesWorld

RULES = ("add", "follow_up", "crowd", "step", "step_with", "abort", "finish", "impossible", "drain")

# What must have happened in so many histories, and how often at least, or they show less than they
# claim. Fewer histories must have shown as much in proportion.
SEEN = {  # in 2,000
    **{f"rule {name}": 100 for name in RULES},
    **{f"refused: {kind}": 50 for kind in machine.IMPOSSIBLE},
    **{f"blocked: {what}": 100 for what in ("batch slots", "tokens", "blocks")},
    **{f"ended: {how}": 100 for how in ("length", "computed", "aborted", "finished", "failed")},
    **{f"re-ordered by {name}": 10 for name in SETUPS["policy"] if name != "fcfs"},
    **{f"report: {what}": 100 for what in ("evicted", "salt", "last_token")},
    "preempted: recompute": 100, "preempted: swap": 100, "swapped in": 100,
    "host memory is full": 20, "resumed from a prefix": 100, "partial reuse": 500, "stalled": 100,
    "aborted in flight": 500, "finished in flight": 500, "void rows": 50,
    **dict.fromkeys(("copies", "revived", "evicted", "forks", "mixed steps", "chunks",
                     "read in its step", "broken rows"), 1000),
}  # fmt: skip
SEEN_AHEAD = {  # in 500
    "planned ahead": 5_000, "rows in vain": 300, "ended: length": 1_000, "ended: aborted": 100,
    "ended: finished": 100, "ended: failed": 50, "forks": 300, "preempted: recompute": 50,
    "preempted: swap": 50, "copies": 100, "partial reuse": 100, "aborted in flight": 100,
}  # fmt: skip
SEEN_IN_STAGES = {  # in 120
    "planned ahead": 1_000, "as many as stages": 200, "chunks in a row": 100, "ended: length": 200,
    "ended: aborted": 20, "ended: failed": 10, "forks": 50, "preempted: recompute": 10,
    "preempted: swap": 10, "aborted in flight": 20,
}  # fmt: skip
SEEN_DRAFTED = {  # in 250
    "rows with drafts": 3000, "nothing drafted": 500, "fewer drafts than planned": 200,
    "drafts cut short": 1000, "drafts beside a prefill": 500, "all accepted": 1000,
    "some accepted": 200, "all rejected": 1000, "preempted after drafts: recompute": 30,
    "preempted after drafts: swap": 10, "planned twice": 2000, "cut": 10,
}  # fmt: skip
SEEN_DRAFTED_AHEAD = {
    name: count // 2 for name, count in SEEN_DRAFTED.items() if name != "planned twice"
} | {"planned ahead": 2500}


@dataclass(frozen=True)
class Kind:
    """Histories of one kind: how many run in `make test` and in all, and what was seen in `per`."""

    world: type[World]
    usual: int
    all: int
    seen: Mapping[str, int]
    per: int
    drafts: bool = False


KINDS = {
    "plain": Kind(World, 30, 2000, SEEN, 2000),
    "ahead": Kind(AheadWorld, 50, 500, SEEN_AHEAD, 500),
    "ahead, late": Kind(LateWorld, 50, 500, SEEN_AHEAD, 500),
    "stages": Kind(StagesWorld, 60, 120, SEEN_IN_STAGES, 120),
    "stages, late": Kind(LateStagesWorld, 60, 120, SEEN_IN_STAGES, 120),
    "drafts": Kind(World, 15, 2000, SEEN_DRAFTED, 250, True),
    "drafts, ahead": Kind(AheadWorld, 12, 500, SEEN_DRAFTED_AHEAD, 250, True),
    "drafts, late": Kind(LateWorld, 12, 500, SEEN_DRAFTED_AHEAD, 250, True),
}
PARTS = [
    pytest.param(name, *part.values, id=f"{name}-{part.id}", marks=part.marks)
    for name, kind in KINDS.items()
    for part in part_and_rest(range(kind.usual), kind.all)
]


@pytest.mark.parametrize(("name", "seeds"), PARTS)
def test_seeded_histories(name: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, coverage = KINDS[name], Counter[str]()
    monkeypatch.setattr(machine, "World", kind.world)
    for seed in seeds:
        try:
            world = machine.random_history(
                seed, coverage, **(drafting(seed) if kind.drafts else {})
            )
        except Exception as error:
            error.add_note(f"history {seed}")
            raise
        assert world.num_steps >= MIN_STEPS
    assert coverage["histories"] == len(seeds)
    least = {name: count * len(seeds) // kind.per for name, count in kind.seen.items()}
    missing = {name: coverage[name] for name in least if coverage[name] < least[name]}
    assert not missing, coverage
    assert not coverage["re-ordered by fcfs"]


class DraftingMachine(SchedulerMachine):
    """The same, by Hypothesis."""

    @initialize(setup=machine.drawn(Setup, {**SETUPS, **DRAFTS}))
    def begin(self, setup: Setup) -> None:
        self.world = World(setup, self.coverage)


COMMON = (
    *(f"rule {name}" for name in RULES),
    *("preempted: recompute", "copies", "revived", "forks", "partial reuse"),
)
SHRINKING: Mapping[str, tuple[type[World], type[SchedulerMachine], int, int, tuple[str, ...]]] = {
    "plain": (World, SchedulerMachine, 12, 300, COMMON),
    "ahead": (AheadWorld, SchedulerMachine, 12, 60, ("planned ahead",)),
    "ahead, late": (LateWorld, SchedulerMachine, 12, 60, ("planned ahead",)),
    "drafts": (
        *(World, DraftingMachine, 8, 50),
        # What is rare is up to Hypothesis; the seeded histories above must have met it.
        tuple(name for name, count in SEEN_DRAFTED.items() if count >= 200),
    ),
}


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SHRINKING)
def test_histories_that_shrink(name: str, slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world, rules, few, many, seen = SHRINKING[name]
    count = many if slow else few
    monkeypatch.setattr(machine, "World", world)
    coverage = rules.coverage
    coverage.clear()
    run_state_machine_as_test(
        rules,
        settings=settings(
            max_examples=count,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert coverage["histories"] >= count
    assert sum(coverage[f"rule {name}"] for name in RULES) >= MIN_STEPS * coverage["histories"]
    if slow or rules is DraftingMachine:
        assert not [name for name in seen if not coverage[name]], coverage


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_its_order(policy: str) -> None:
    """Also a new one, from which `SETUPS` does not draw."""
    for seed in range(5):
        machine.random_history(seed, Counter(), policy=policy)


def simplest(table: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    return {name: values[0] for name, values in table.items()}


def test_a_preempted_fork_counts_no_prefix_hits() -> None:
    """Found by these histories: the second completion of a request had no report of its own, so
    what it found again after a preemption counted as a hit, and its prompt a second time."""
    setup = Setup(**{**simplest(SETUPS), "prefix_cache": "hash", "capacity": 24, "max_num_seqs": 2})
    world = World(setup, Counter())
    world.add(machine.Spec(**{**simplest(machine.SPECS), "length": 8, "n": 2, "max_tokens": 12}))
    world.close()
    counters = world.scheduler.counters
    assert counters.num_preemptions_recompute > 0
    assert (counters.num_prompt_tokens, counters.num_cached_tokens) == (8, 0)


@pytest.mark.slow
@pytest.mark.parametrize("count", [60, 300])
def test_names_of_one_byte_cost_misses_and_nothing_else(count, monkeypatch):
    """The chain does not rest on its hash: with collisions everywhere no foreign block is read."""
    monkeypatch.setattr(
        HashChain,
        "name",
        lambda self, *names: blake2b(repr(names).encode(), digest_size=1).digest(),
    )
    for seed in range(count):
        machine.random_history(seed, Counter(), prefix_cache="hash")


def test_events_are_all_known() -> None:
    """A misspelt event would do nothing, and pass."""
    assert set(machine.EVENTS) | set(machine.CROWD_EVENTS) == {
        "abort",
        "finish",
        "fail",
        "break",
        None,
    }
    assert set(machine.DRAFT_EVENTS) == {*machine.EVENTS, "cut"}
