"""Deliberate bugs of drafts are caught by the histories, each by the promise that it breaks."""

import re
from collections import Counter

import pytest

from tests.scheduling import machine
from tests.scheduling.machine import random_history
from tests.scheduling.planted_bugs import Bug
from tests.scheduling.planted_draft_bugs import AHEAD_BUGS, DRAFT_BUGS, SETUP, Ahead
from tests.scheduling.test_ahead import AheadWorld


def first_failure(bug: Bug) -> str | None:
    """How a history fails."""
    for seed in bug.seeds:
        try:
            random_history(seed, Counter(), **bug.setup)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.mutation
@pytest.mark.parametrize("bug", DRAFT_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_caught(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug.apply(monkeypatch)
    failure = first_failure(bug)
    assert failure is not None, "nothing noticed"
    assert re.search(bug.caught_by, failure), failure


@pytest.mark.mutation
@pytest.mark.parametrize("bug", AHEAD_BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_planning_ahead_is_caught(
    bug: Ahead, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "World", AheadWorld)
    nothing = Bug("nothing", "", lambda patch: None, SETUP)
    assert first_failure(nothing) is None
    bug.apply(monkeypatch)
    assert first_failure(nothing) is not None, "nothing noticed"


SETUPS = {str(sorted(bug.setup.items(), key=str)): bug for bug in DRAFT_BUGS}


@pytest.mark.mutation
@pytest.mark.parametrize("setup", SETUPS)
def test_the_same_histories_pass_without_a_bug(setup: str) -> None:
    assert first_failure(SETUPS[setup]) is None


def test_there_are_no_two_bugs_of_a_name() -> None:
    names = [bug.name for bug in (*DRAFT_BUGS, *AHEAD_BUGS)]
    assert len(set(names)) == len(names) >= 20
