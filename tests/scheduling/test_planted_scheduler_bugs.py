"""Deliberate bugs are caught: each makes a short series of histories fail, in its own way."""

import re
from collections import Counter

import pytest

from minillm.cache.hash_chain import HashChain
from tests.scheduling.machine import random_history
from tests.scheduling.planted_bugs import BUGS, Bug, weak_name


def first_failure(bug: Bug) -> tuple[int, str] | None:
    """Which history fails, and how."""
    coverage: Counter[str] = Counter()
    for seed in bug.seeds:
        try:
            random_history(seed, coverage, **bug.setup)
        except Exception as error:
            return seed, f"{type(error).__name__}: {error}"
    return None


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught_by_the_promise_it_breaks(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug.apply(monkeypatch)
    failure = first_failure(bug)
    assert failure is not None, "nothing noticed"
    assert re.search(bug.caught_by, failure[1]), failure


BY_THE_LIBRARY = [bug for bug in BUGS if bug.caught_by.startswith("AccountingError")]


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BY_THE_LIBRARY, ids=lambda bug: bug.name)
def test_what_the_library_checks_itself_is_caught_without_it(
    bug: Bug, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of these tests stand alone: they share no code with `check_invariants`."""
    monkeypatch.setattr("tests.scheduling.machine.check_invariants", lambda scheduler: None)
    bug.apply(monkeypatch)
    assert first_failure(bug) is not None, "nothing noticed"


# One bug for each setup and series.
SERIES = {(tuple(sorted(bug.setup.items())), bug.seeds): bug for bug in BUGS}


@pytest.mark.mutation
@pytest.mark.parametrize("series", SERIES, ids=str)
def test_the_same_histories_pass_without_a_bug(series: tuple) -> None:
    """So what fails above is the bug."""
    assert first_failure(SERIES[series]) is None


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_names_of_one_byte_cost_misses_and_nothing_else(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain does not rest on its hash: with collisions everywhere no foreign block is read."""
    monkeypatch.setattr(HashChain, "name", weak_name)
    coverage: Counter[str] = Counter()
    for seed in range(count):
        random_history(seed, coverage, prefix_cache="hash")
