"""What tests ask of the verdict on a program that a stranger wrote."""

from collections.abc import Callable

from minillm_exercises.results import Verdict

Graded = Callable[..., Verdict]  # what the fixture `graded` of conftest.py is


def failed(verdict: Verdict) -> list[str]:
    """The checks that did not pass."""
    return [check.name for check in verdict.checks if check.status != "pass"]


def said(verdict: Verdict) -> str:
    """The first sentence to the stranger."""
    return next(check.message for check in verdict.checks if check.message)
