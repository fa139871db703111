"""Grading one file: read it (`guard`), run it elsewhere (`runner`), say what came out.

verdict = grade(exercise, path)
"""

import ast
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from minillm_exercises.child import LOADING
from minillm_exercises.errors import ExerciseError
from minillm_exercises.guard import inspect_source
from minillm_exercises.limits import DEFAULT, Limits
from minillm_exercises.manifest import Exercise
from minillm_exercises.mutants import Mutant
from minillm_exercises.results import CheckResult, Status, Verdict, same_behaviour
from minillm_exercises.runner import run_submission
from minillm_exercises.wording import (
    crash_sentence,
    error_sentence,
    shorten_printed,
    source_line,
    timeout_sentence,
)

VACUOUS = (
    "This check compared nothing, so it cannot pass; that is the course's mistake, not yours. "
    "Please report it."
)


def grade(
    exercise: Exercise,
    submission: Path,
    *,
    seed: int = 0,
    limits: Limits = DEFAULT,
    diagnose: bool = True,
) -> Verdict:
    """Grade the file `submission`.

    `seed` is added to the public seeds of the checks (`checking.seeds`); `diagnose` compares what
    fails with the exercise's known misconceptions, if they are there.

    Raises:
        ExerciseError: the exercise itself is broken; nothing a learner writes raises.
    """
    return Grader(exercise, seed=seed, limits=limits).grade(submission, diagnose=diagnose)


def list_checks(exercise: Exercise) -> tuple[CheckResult, ...]:
    """The checks of an exercise in order, as results that were not run; read, not executed.

    Raises:
        ExerciseError: there is none, or a test function is not marked with ``@check(points, task)``
            in constants.
    """
    name = exercise.checks.name
    try:
        tree = ast.parse(exercise.checks.read_text(encoding="utf-8"))
    except (OSError, SyntaxError) as error:
        raise ExerciseError(f"{name} cannot be read: {error}.") from None
    found = [
        _check_of(node, name)
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    if not found:
        raise ExerciseError(
            f"{name} has no check, and grading nothing may not pass: write functions "
            f"`def test_...(impl)` marked with @check."
        )
    return tuple(found)


def _check_of(function: ast.FunctionDef, file: str) -> CheckResult:
    for mark in function.decorator_list:
        if isinstance(mark, ast.Call) and ast.unparse(mark.func).split(".")[-1] == "check":
            try:
                given = dict(
                    zip(("points", "task"), map(ast.literal_eval, mark.args), strict=False)
                )
                given |= {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
            except ValueError:
                break
            return CheckResult(
                function.name, given.get("task", ""), given.get("points", 1), "not run"
            )
    raise ExerciseError(
        f"{file}: {function.name} needs @check(points=..., task='...') with constants."
    )


class Grader:
    """Grades submissions of one exercise, and remembers what its known mistakes look like."""

    def __init__(self, exercise: Exercise, *, seed: int = 0, limits: Limits = DEFAULT) -> None:
        self.exercise = exercise
        self.checks = list_checks(exercise)
        self._seed, self._limits = seed, limits
        self._known: dict[tuple[str, str], CheckResult] = {}  # by mutant and check

    def grade(self, submission: Path, *, diagnose: bool = True) -> Verdict:
        """The verdict on a file."""
        start = time.perf_counter()
        verdict = self._grade(submission, diagnose)
        return verdict.replace(seconds=time.perf_counter() - start)

    def _grade(self, submission: Path, diagnose: bool) -> Verdict:
        try:
            data = submission.read_bytes()
        except OSError as error:
            return self._unrun("missing", f"There is no file to grade: {error.strerror}.")
        if finding := inspect_source(data, self.exercise):
            return self._unrun(finding.status, finding.message)
        verdict = self.run(data.decode("utf-8-sig"))
        return self.diagnose(verdict) if diagnose else verdict

    def run(
        self,
        source: str,
        *,
        checks: Sequence[str] = (),
        seed: int | None = None,
        limits: Limits | None = None,
        stop: bool = False,
    ) -> Verdict:
        """Run `source` without reading it first; only `checks`, if some are named; within `limits`,
        if they are not the grader's."""
        wanted = [c for c in self.checks if not checks or c.name in checks]
        outcome = run_submission(
            self.exercise,
            source,
            [check.name for check in wanted],
            seed=self._seed if seed is None else seed,
            limits=limits or self._limits,
            stop=stop,
        )
        return _Reading(self.exercise, wanted, source, outcome).verdict()

    def _unrun(self, status: Status, message: str) -> Verdict:
        return Verdict(self.exercise.id, status, self.checks, message)

    def diagnose(self, verdict: Verdict) -> Verdict:
        """Name the one mutant that does the same as the submission in every check that ran.

        The first check that failed is asked alone: most mutants differ there, and each run costs
        time. A submission with several mistakes agrees with a mutant there and not everywhere. Then
        the misconception of the mutant that agrees in the most checks is given as a part.
        """
        if verdict.status != "fail":
            return verdict
        ran = [check for check in verdict.checks if check.status != "not run"]
        ran.sort(key=lambda check: check.status == "pass")
        near = [m for m in self.mutants if self._agrees(m, ran[:1])]
        same = [m for m in near if self._agrees(m, ran[1:])]
        if len(same) == 1:
            return verdict.replace(mutant=same[0].name, misconception=same[0].teaches)
        if same or not near:
            return verdict
        ranks = {m: sum(self._agrees(m, [check]) for check in ran) for m in near}
        best = [m for m in near if ranks[m] == max(ranks.values())]
        if len(best) > 1:
            return verdict
        return verdict.replace(misconception=best[0].teaches, partial=True)

    @cached_property
    def mutants(self) -> tuple[Mutant, ...]:
        """The known-wrong solutions, made once."""
        return self.exercise.mutants

    def remember(self, mutant: Mutant, verdict: Verdict) -> None:
        """Take the verdict of a run of `mutant` with all checks for what it does in each of them,
        which `diagnose` then need not find out; one that ended early says too little."""
        if verdict.status in ("pass", "fail"):
            self._known |= {(mutant.name, check.name): check for check in verdict.checks}

    def forget(self, mutant: Mutant) -> None:
        """Let `diagnose` find out again what `mutant` does."""
        for check in self.checks:
            self._known.pop((mutant.name, check.name), None)

    def twins(self, mutant: Mutant) -> list[Mutant]:
        """The other mutants that no check can tell from `mutant`."""
        checks = self.run(mutant.source).checks
        others = [other for other in self.mutants if other != mutant]
        return [other for other in others if self._agrees(other, checks)]

    def _agrees(self, mutant: Mutant, checks: Sequence[CheckResult]) -> bool:
        """Whether a mutant behaves like the submission with these results."""
        new = [check.name for check in checks if (mutant.name, check.name) not in self._known]
        if new:
            for result in self.run(mutant.source, checks=new).checks:
                self._known[mutant.name, result.name] = result
        return all(same_behaviour(self._known[mutant.name, c.name], c) for c in checks)


class _Reading:
    """Turns the reports on one submission into a verdict."""

    def __init__(
        self,
        exercise: Exercise,
        checks: Sequence[CheckResult],
        source: str,
        outcome: dict[str, Any],
    ) -> None:
        self._exercise, self._checks = exercise, checks
        self._limits = Limits(**outcome["limits"])
        self._lines = source.splitlines()
        self._outcome = outcome
        self._reports: list[dict[str, Any]] = outcome["reports"]

    def verdict(self) -> Verdict:
        results = {r["check"]: r for r in self._reports if r["event"] == "result"}
        checks = [
            self._result(check, results[check.name]) if check.name in results else check
            for check in self._checks
        ]
        status, message = self._whole(checks, [r.get("status", "") for r in results.values()])
        if status in ("crashed", "timeout"):
            running = self._reports[-1]["check"] if self._reports else ""
            checks = [
                c.replace(status="error", message=message) if c.name == running else c
                for c in checks
            ]
        printed = shorten_printed(self._outcome["printed"])
        return Verdict(self._exercise.id, status, tuple(checks), message, printed=printed)

    def _result(self, check: CheckResult, report: dict[str, Any]) -> CheckResult:
        line = report.get("line", 0)
        message = {
            "pass": "",
            "vacuous": VACUOUS,
            "todo": report.get("message", ""),
            "fail": report.get("message") or f"This does not hold: {check.task}.",
            "error": error_sentence(report),
        }[report["status"]]
        status = {"vacuous": "error", "todo": "not run"}.get(report["status"], report["status"])
        return check.replace(
            status=status,
            message=message,
            error=report.get("type", "") if status == "error" else "",
            where=source_line(self._lines, line),
            seconds=report["seconds"],
            trace=tuple(report.get("trace", ())),
        )

    def _whole(self, checks: list[CheckResult], statuses: list[str]) -> tuple[Status, str]:
        """The status of the submission, and a sentence where the checks do not say it all."""
        last = self._reports[-1] if self._reports else {"event": "nothing", "check": LOADING}
        task = next((c.task for c in self._checks if c.name == last["check"]), "")
        while_ = f"in the check \u201c{task}\u201d" if task else "while your file was being loaded"
        where = source_line(self._lines, int(last.get("line") or self._outcome["fault"]))
        if last["event"] in ("timeout", "silent"):
            return "timeout", timeout_sentence(last, where, while_, self._limits)
        if last["event"] != "end":
            return "crashed", crash_sentence(
                last, self._outcome["exit"], where, while_, self._limits
            )
        for report in self._reports:
            if report["event"] == "unloadable":
                return self._unloadable(report)
        if checks and all(check.status == "pass" for check in checks):
            return "pass", ""
        todo = {c.message for c in checks if c.status == "not run" and c.message}
        if todo and all(status in ("pass", "todo") for status in statuses):
            return "todo", f"Still to do: {'; '.join(sorted(todo))}"
        return "fail", ""

    def _unloadable(self, report: dict[str, Any]) -> tuple[Status, str]:
        if report["status"] == "todo":
            return "todo", f"Still to do: {report['message']}"
        where = source_line(self._lines, report["line"])
        text = error_sentence(report)
        return "crashed", f"Your file could not be loaded{f' ({where})' if where else ''}. {text}"
