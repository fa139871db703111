"""What grading produces: plain data that the board, the notebooks and the JSON report share."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

CheckStatus = Literal["pass", "fail", "error", "not run"]
Status = Literal["pass", "fail", "refused", "crashed", "timeout", "todo", "missing"]


@dataclass(frozen=True)
class CheckResult:
    """One check of one submission; `message` is for the learner and empty when it passed."""

    name: str
    task: str
    points: int
    status: CheckStatus
    message: str = ""
    where: str = ""  # "line 14: return x[t]", the deepest line of the learner's file
    seconds: float = 0.0
    error: str = ""  # the type of the exception, for the status "error"
    trace: tuple[object, ...] = ()

    def replace(self, **changes: Any) -> "CheckResult":
        """The same result with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Verdict:
    """The outcome of grading one file.

    `status`: "pass" all checks passed; "fail" some did not; "todo" the starter's
    NotImplementedError is still there; "refused" the file uses what the exercise forbids, or is no
    Python; "crashed" the process ended without a result (`os._exit`, a segfault, memory);
    "timeout"; "missing" there is no file, or a required name is not in it.
    """

    exercise_id: str
    status: Status
    checks: tuple[CheckResult, ...] = ()
    message: str = ""  # one sentence on the whole, empty when the checks speak for themselves
    misconception: str = ""  # the teaching message of the one mutant that behaves the same
    mutant: str = ""  # its name
    partial: bool = False  # the misconception explains the first failure, and not all
    printed: str = ""  # what the code printed, shortened
    seconds: float = 0.0

    @property
    def earned(self) -> int:
        """Points of the checks that passed."""
        return sum(check.points for check in self.checks if check.status == "pass")

    def replace(self, **changes: Any) -> "Verdict":
        """The same verdict with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the traces."""
        data = asdict(self) | {"earned": self.earned}
        for check in data["checks"]:
            del check["trace"]
        return data


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
