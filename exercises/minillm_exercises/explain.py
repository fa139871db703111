"""A verdict in words: what a learner is told, the same at a terminal and in a notebook.

Nothing here depends on a clock, so that a notebook's output is the same each time.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from minillm_exercises.manifest import Exercise
from minillm_exercises.progress import Entry
from minillm_exercises.results import CheckResult, Verdict
from minillm_exercises.standing import Standing, max_points

WORDS = (("pass", "passed"), ("fail", "not yet"), ("error", "error"), ("not run", "not run"))
KEPT_LINES = 12  # of what the code printed
# Everything a terminal could take for a command: escape sequences and other control characters.
CONTROL = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class Voice(Protocol):
    """How to write down what the learner should do next."""

    def do(self, command: str, exercise_id: str, *options: str) -> str:
        """The text that runs `command`."""


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
        typed = sys.orig_argv[0] if sys.orig_argv[1:2] == ["-m"] else sys.executable
        return cls(shlex.quote(typed))

    def do(self, command: str, exercise_id: str = "", *options: str) -> str:
        """``python -m minillm_exercises hint e03.1``."""
        words = (self.python, "-m", "minillm_exercises", command, exercise_id, *options)
        return " ".join(word for word in words if word)


@dataclass(frozen=True)
class Cell:
    """Commands as they are written into a notebook's cell."""

    def do(self, command: str, exercise_id: str = "", *options: str) -> str:
        """``hint("e03.1")``; what a notebook has no function for is a command of the shell."""
        known = {"hint": "hint", "run": "check"}
        if command in known:
            return f'{known[command]}("{exercise_id}")'
        return Shell().do(command, exercise_id, *options)


@dataclass(frozen=True)
class Line:
    """One check: its status, what it is about, and "2/3" points."""

    status: str
    word: str
    task: str
    points: str


@dataclass(frozen=True)
class Trouble:
    """One failure, expanded; `misconception` is empty unless the code behaves like a known bug."""

    task: str
    message: str
    where: str = ""
    misconception: str = ""


@dataclass(frozen=True)
class Explained:
    """Everything a verdict shows, top to bottom."""

    title: str
    passed: bool
    lines: tuple[Line, ...]
    troubles: tuple[Trouble, ...]
    printed: str
    summary: str
    advice: tuple[str, ...]

    def text(self) -> str:
        """As plain text, for a log or an output that is compared."""
        wide = max([len(line.task) for line in self.lines], default=0)
        parts = [self.title]
        parts += [f"  {n.word:<8} {n.task:<{wide}}  {n.points}" for n in self.lines]
        for trouble in self.troubles:
            parts += ["", *_trouble_lines(trouble)]
        if self.printed:
            parts += ["", "Your code printed:", *(f"  {x}" for x in self.printed.splitlines())]
        return "\n".join([*parts, "", self.summary, *self.advice])


def _trouble_lines(trouble: Trouble) -> list[str]:
    lines = [f"{trouble.task}:"] if trouble.task else []
    lines += [f"  {line}" for line in trouble.message.splitlines()]
    lines += [f"  Your {trouble.where}"] if trouble.where else []
    return lines + ([f"  Perhaps: {trouble.misconception}"] if trouble.misconception else [])


def clean(text: str) -> str:
    """Text that a terminal or a page can show: control characters and escapes removed."""
    return CONTROL.sub("", text.expandtabs(4))


def shortened(text: str, lines: int = KEPT_LINES) -> str:
    """The first lines of what was printed, and how many were left out."""
    kept = [line[:200] for line in clean(text).rstrip().splitlines()]
    if len(kept) <= lines:
        return "\n".join(kept)
    return "\n".join([*kept[:lines], f"... and {len(kept) - lines} lines more"])


def explain(
    exercise: Exercise,
    verdict: Verdict,
    entry: Entry,
    voice: Voice,
    following: Standing | None = None,
    verbose: bool = False,
) -> Explained:
    """What to tell the learner. `following` is the exercise to propose after a pass; `verbose`
    expands every failure instead of the first."""
    failures = [check for check in verdict.checks if check.status in ("fail", "error")]
    shown = failures if verbose else failures[:1]
    troubles = [_trouble(check, verdict, first=check is failures[0]) for check in shown]
    if verdict.message and verdict.message not in {check.message for check in failures}:
        troubles.insert(0, Trouble("", clean(verdict.message)))
    return Explained(
        title=f"{exercise.id}  {exercise.title}",
        passed=verdict.status == "pass",
        lines=tuple(_line(check) for check in verdict.checks),
        troubles=tuple(troubles),
        printed=shortened(verdict.printed, 200 if verbose else KEPT_LINES),
        summary=summary(exercise, verdict),
        advice=(
            *_others(len(failures) - len(shown)),
            *_advice(exercise, verdict, entry, voice, following),
        ),
    )


def _others(count: int) -> list[str]:
    """How many failures are not shown."""
    if count < 1:
        return []
    checks = "One other check fails" if count == 1 else f"{count} other checks fail"
    return [f"{checks} too. Repair the first one, and run it again."]


def summary(exercise: Exercise, verdict: Verdict) -> str:
    """``4 of 5 points, public checks 3/4; an instructor may run more.``"""
    passed = sum(check.status == "pass" for check in verdict.checks)
    total = sum(check.points for check in verdict.checks) or max_points(exercise)
    checks = f"public checks {passed}/{len(verdict.checks)}" if verdict.checks else "no check ran"
    return f"{verdict.earned} of {total} points, {checks}; an instructor may run more."


def _line(check: CheckResult) -> Line:
    points = check.points if check.status == "pass" else 0
    word = dict(WORDS)[check.status]
    return Line(check.status, word, clean(check.task), f"{points}/{check.points}")


def _trouble(check: CheckResult, verdict: Verdict, first: bool) -> Trouble:
    misconception = verdict.misconception if first else ""
    if misconception and verdict.partial:
        misconception = f"{misconception} (And there is another mistake.)"
    where = clean(check.where)
    return Trouble(clean(check.task), clean(check.message), where, clean(misconception))


def _advice(
    exercise: Exercise, verdict: Verdict, entry: Entry, voice: Voice, following: Standing | None
) -> Sequence[str]:
    """The next step, and what else is open."""
    if verdict.status == "pass":
        ours = f"Compare with ours: {voice.do('solution', exercise.id)}"
        compare = [ours] if has_answer(exercise) else []
        if following is None:
            return [*compare, "Everything that can be done here is done."]
        command = "run" if following.state == "begun" else "start"
        return [*compare, f"Next: {Shell.do(_shell(voice), command, following.exercise.id)}"]
    if verdict.status == "todo":
        return [
            "Write your code in place of the line that raises NotImplementedError.",
            f"Then: {voice.do('run', exercise.id)}",
            f"No idea yet: {voice.do('hint', exercise.id)}",
        ]
    left = len(exercise.hints) - entry.hints
    if left > 0:
        return [f"Stuck: {voice.do('hint', exercise.id)}  (hint {entry.hints + 1} of 3)"]
    again = f"The hints again: {voice.do('hint', exercise.id, '-n', '3')}"
    if not has_answer(exercise):
        return [again]
    return [again, f"The answer: {voice.do('solution', exercise.id, '--give-up')}"]


def has_answer(exercise: Exercise) -> bool:
    """A learner's release has none."""
    return (exercise.answers / "solution.py").is_file()


def _shell(voice: Voice) -> Shell:
    return voice if isinstance(voice, Shell) else Shell()
