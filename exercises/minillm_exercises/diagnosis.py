"""When two submissions behave the same: what a check saw of each, up to where it failed."""

import math

from minillm_exercises.results import CheckResult


def same_behaviour(one: CheckResult, other: CheckResult) -> bool:
    """Both right, or wrong in the same way: equal in every value seen; numbers within rounding."""
    if one.status == other.status == "pass":
        return True  # an order, say, that is free and was observed all the same
    return (one.status, one.error) == (other.status, other.error) and _same(one.trace, other.trace)


def _same(one: object, other: object) -> bool:
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    kinds = {type(one), type(other)}
    if float in kinds and kinds <= {int, float}:
        return _near(float(one), float(other))  # type: ignore[arg-type]
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _near(one: float, other: float) -> bool:
    both_nan = math.isnan(one) and math.isnan(other)
    return both_nan or math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-7)
