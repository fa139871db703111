"""What tests ask of the verdict on a program that a stranger wrote."""

from collections.abc import Callable

from minillm_exercises.manifest import Exercise
from minillm_exercises.results import Verdict

Graded = Callable[..., Verdict]  # what the fixture `graded` of conftest.py is


def failed(verdict: Verdict) -> list[str]:
    """The checks that did not pass."""
    return [check.name for check in verdict.checks if check.status != "pass"]


def said(verdict: Verdict) -> str:
    """The first sentence to the stranger."""
    return next(check.message for check in verdict.checks if check.message)


def statuses(verdict: Verdict) -> list[str]:
    """What came of each check."""
    return [check.status for check in verdict.checks]


def solution(exercise: Exercise) -> str:
    """Our solution of an exercise."""
    return (exercise.answers / "solution.py").read_text("utf-8")


def with_first(exercise: Exercise, statement: str) -> str:
    """The solution of e90.1 with a statement in front of window_sums."""
    anchor = "    starts = "
    assert anchor in solution(exercise)
    return solution(exercise).replace(anchor, f"    {statement}\n{anchor}")
