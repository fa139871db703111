"""What a learner sees, at a terminal and in a notebook: the board of all exercises, one verdict.

Every state is a word and a mark, never only a colour, so that the screens can be printed, piped
and read by everybody.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from minillm_exercises.explain import Trouble, clean, summary, troubles
from minillm_exercises.manifest import Exercise
from minillm_exercises.results import Verdict
from minillm_exercises.session import Standing

BAR = 30  # characters
STYLES: Mapping[str, str] = MappingProxyType(
    {
        "pass": "green", "fail": "red", "error": "red", "not run": "dim",
        "done": "green", "begun": "yellow", "open": "", "unavailable": "dim",
    }
)  # fmt: skip
MARKS: Mapping[str, tuple[str, str]] = MappingProxyType(  # with UTF-8, and without
    {
        "pass": ("✓", "+"), "fail": ("✗", "x"), "error": ("!", "!"), "not run": ("·", "."),
        "done": ("✓", "+"), "begun": ("…", "~"), "open": (" ", " "), "unavailable": ("-", "-"),
        "bar": ("█", "#"), "rest": ("░", "-"), "hard": ("●", "*"), "easy": ("○", "."),
    }
)  # fmt: skip
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "pass": "passed", "fail": "not yet", "error": "error", "not run": "not run",
        "done": "done", "begun": "begun", "open": "", "unavailable": "not here",
    }
)  # fmt: skip


def mark(name: str, console: Console) -> str:
    """The sign for a state, in what the terminal can show."""
    plain = not console.encoding.lower().startswith("utf")
    return MARKS[name][plain]


def board(rows: Sequence[Standing], console: Console) -> Group:
    """The table of all exercises and the total."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    for name, right in (("", False), ("id", False), ("exercise", False), ("ch", False),
                        ("min", True), ("level", False), ("points", True)):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "exercise")
    for row in rows:
        style = STYLES[row.state]
        state = Text(f"{mark(row.state, console)} {WORDS[row.state]}", style=style)
        title = Text(row.exercise.title)
        if row.state == "unavailable":
            title.append(f"\n{row.why}", style="dim")
        e = row.exercise
        level = mark("hard", console) * e.difficulty + mark("easy", console) * (3 - e.difficulty)
        points = f"{row.earned}/{row.points}"
        table.add_row(state, e.id, title, e.chapter, str(e.minutes), level, points)
    return Group(table, Text(), total(rows, console))


def total(rows: Sequence[Standing], console: Console) -> Text:
    """The bar over the points of all exercises, with the numbers in words."""
    earned = sum(row.earned for row in rows)
    points = sum(row.points for row in rows)
    done = sum(row.state == "done" for row in rows)
    full = BAR * earned // points if points else 0
    return Text.assemble(
        (mark("bar", console) * full, "green"),
        (mark("rest", console) * (BAR - full), "dim"),
        f"  {earned} of {points} points, {done} of {len(rows)} done",
    )


def verdict_screen(
    exercise: Exercise, verdict: Verdict, console: Console, where: str = "", verbose: bool = False
) -> RenderableType:
    """One graded exercise: a line per check, the failure, what was printed, the points."""
    title = f"{exercise.id}  {exercise.title}"
    parts: list[RenderableType] = [
        Text.assemble((title, "bold"), (f"  {where}" if where else "", "dim"))
    ]
    if verdict.checks:
        parts += [Text(), Padding(_checks(verdict, console), (0, 0, 0, 2))]
    for trouble in troubles(verdict, verbose):
        parts += [Text(), *_trouble(trouble)]
    if verdict.printed:
        printed = Text(clean(verdict.printed).rstrip())
        parts += [Text(), Text("Your code printed:", style="dim"), Padding(printed, (0, 0, 0, 2))]
    style = "bold green" if verdict.status == "pass" else "bold"
    return Group(*parts, Text(), Text(summary(exercise, verdict), style=style))


def _checks(verdict: Verdict, console: Console) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    for check in verdict.checks:
        sign = f"{mark(check.status, console)} {WORDS[check.status]}"
        points = f"{check.points if check.status == 'pass' else 0}/{check.points}"
        table.add_row(Text(sign, style=STYLES[check.status]), Text(clean(check.task)), points)
    return table


def _trouble(trouble: Trouble) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if trouble.task:
        parts.append(Text(trouble.task, style="bold red"))
    body = Text(trouble.message)
    if trouble.where:
        body.append(f"\nYour {trouble.where}", style="cyan")
    parts.append(Padding(body, (0, 0, 0, 2)))
    if trouble.misconception:
        said = Text.assemble(("Perhaps: ", "bold yellow"), trouble.misconception)
        parts.append(Padding(said, (0, 0, 0, 2)))
    return parts


def advised(line: str) -> Text:
    """A line of advice, its label bold; print it with `soft_wrap`, so that a command stays whole
    and can be copied."""
    label, colon, rest = line.partition(": ")
    return Text.assemble((f"{label}: ", "bold"), rest) if colon and len(label) < 20 else Text(line)
