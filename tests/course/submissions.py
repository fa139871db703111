"""Submissions to the toy exercises, and what is asked of their verdicts."""

from collections.abc import Callable

from minillm_exercises.manifest import Exercise
from minillm_exercises.results import Verdict

Graded = Callable[..., Verdict]


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
