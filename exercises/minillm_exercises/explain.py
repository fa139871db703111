"""A verdict in words: what a learner is told, the same at a terminal and in a notebook.

Nothing here depends on a clock, so that a notebook's output is the same each time.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from minillm_exercises.manifest import Exercise
from minillm_exercises.progress import Entry
from minillm_exercises.results import CheckResult, Verdict
from minillm_exercises.session import Standing, max_points

# Everything a terminal could take for a command: escape sequences and other control characters.
CONTROL = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


@dataclass(frozen=True)
class Shell:
    """Commands as they are typed at this terminal."""

    python: str = "python"

    @classmethod
    def here(cls) -> "Shell":
        """With the interpreter that is running: plain ``python`` only where that is the same."""
        found = shutil.which("python")
        if found and Path(found).absolute() == Path(sys.executable).absolute():
            return cls()
        python = sys.orig_argv[0] if sys.orig_argv[1:2] == ["-m"] else sys.executable
        return cls(shlex.quote(python))

    def typed(self, command: str, exercise_id: str = "", *options: str) -> str:
        """``python -m minillm_exercises hint e03.1``."""
        words = (self.python, "-m", "minillm_exercises", command, exercise_id, *options)
        return " ".join(word for word in words if word)

    do = typed


class Cell(Shell):
    """Commands as they are written into a notebook's cell."""

    def do(self, command: str, exercise_id: str = "", *options: str) -> str:
        """``hint("e03.1")``; what a notebook has no function for is a command of the shell."""
        known = {"hint": "hint", "run": "check"}
        if command in known:
            return f'{known[command]}("{exercise_id}")'
        return self.typed(command, exercise_id, *options)


@dataclass(frozen=True)
class Trouble:
    """One failure, expanded; `misconception` is empty unless the code behaves like a known bug."""

    task: str
    message: str
    where: str = ""
    misconception: str = ""


def clean(text: str) -> str:
    """Text that a terminal or a page can show: control characters and escapes removed."""
    return CONTROL.sub("", text.expandtabs(4))


def failures(verdict: Verdict) -> list[CheckResult]:
    """The checks that failed or raised."""
    return [check for check in verdict.checks if check.status in ("fail", "error")]


def troubles(verdict: Verdict, verbose: bool = False) -> Iterator[Trouble]:
    """What went wrong on the whole, and the first failure; `verbose` expands them all."""
    failed = failures(verdict)
    if verdict.message and verdict.message not in {check.message for check in failed}:
        yield Trouble("", clean(verdict.message))
    for check in failed if verbose else failed[:1]:
        misconception = verdict.misconception if check is failed[0] else ""
        if misconception and verdict.partial:
            misconception += " (And there is another mistake.)"
        yield Trouble(*map(clean, (check.task, check.message, check.where, misconception)))


def summary(exercise: Exercise, verdict: Verdict) -> str:
    """``4 of 5 points, public checks 3/4; an instructor may run more.``"""
    passed = sum(check.status == "pass" for check in verdict.checks)
    total = sum(check.points for check in verdict.checks) or max_points(exercise)
    checks = f"public checks {passed}/{len(verdict.checks)}" if verdict.checks else "no check ran"
    return f"{verdict.earned} of {total} points, {checks}; an instructor may run more."


def advice(
    exercise: Exercise,
    verdict: Verdict,
    entry: Entry,
    shell: Shell,
    following: Standing | None = None,
    verbose: bool = False,
) -> Iterator[str]:
    """How many failures are not shown, the next step, and what else is open. `following` is the
    exercise to propose after a pass."""
    hidden = 0 if verbose else len(failures(verdict)) - 1
    if hidden > 0:
        checks = "One other check fails" if hidden == 1 else f"{hidden} other checks fail"
        yield f"{checks} too. Repair the first one, and run it again."
    left = len(exercise.hints) - entry.hints
    if verdict.status == "pass":
        if has_answer(exercise):
            yield f"Compare with ours: {shell.do('solution', exercise.id)}"
        yield next_step(following, shell)
    elif verdict.status == "todo":
        yield "Write your code in place of the line that raises NotImplementedError."
        yield f"Then: {shell.do('run', exercise.id)}"
        yield f"No idea yet: {shell.do('hint', exercise.id)}"
    elif left > 0:
        yield f"Stuck: {shell.do('hint', exercise.id)}  (hint {entry.hints + 1} of 3)"
    else:
        yield f"The hints again: {shell.do('hint', exercise.id, '-n', '3')}"
        if has_answer(exercise):
            yield f"The answer: {shell.do('solution', exercise.id, '--give-up')}"


def next_step(following: Standing | None, shell: Shell) -> str:
    """The exercise to go on with."""
    if following is None:
        return "Everything that can be done here is done."
    command = "run" if following.state == "begun" else "start"
    return f"Next: {shell.typed(command, following.exercise.id)}"


def has_answer(exercise: Exercise) -> bool:
    """A learner's release has none."""
    return (exercise.answers / "solution.py").is_file()
