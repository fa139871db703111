"""What `check` and `hint` show in a notebook: a small table, which a log shows as plain text."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from minillm.errors import MinillmError
from minillm_exercises.explain import Cell, Explained, Trouble, explain
from minillm_exercises.manifest import Exercise
from minillm_exercises.readme import task
from minillm_exercises.session import Session

SIGNS = (("pass", "✓", "#117733"), ("fail", "✗", "#aa3311"), ("error", "!", "#aa3311"),
         ("not run", "·", "#777777"))  # fmt: skip
CELL = "text-align:left;padding:0.1em 1em 0.1em 0;background:none;border:none"


@dataclass(frozen=True)
class Shown:
    """What a cell shows: `text` where there is no page, `html` where there is one."""

    text: str
    html: str
    passed: bool = False

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def check_here(exercise_id: str, *objects: Any, session: Session | None = None) -> Shown:
    """Grade an exercise from a notebook, after saving `objects` (the function or class that was
    written there) into the learner's file. Whatever goes wrong becomes the text that is shown.
    """
    try:
        return _check(exercise_id, objects, session or Session.open())
    except MinillmError as error:
        return message(str(error))
    except Exception as error:  # a notebook runs on; a traceback of ours would teach nothing
        return message(f"{exercise_id} could not be graded: {type(error).__name__}: {error}")


def _not_begun(exercise: Exercise) -> str:
    """Where the task is, and both ways to begin."""
    names = [name for name in exercise.names if "." not in name]  # a method comes with its class
    return (
        f"{exercise.id}, {exercise.title} ({exercise.length}), is not begun. "
        f'task("{exercise.id}") shows the task. Write {" and ".join(names)} in a cell and then '
        f'check("{exercise.id}", {", ".join(names)}), or work in a file: '
        f"python -m minillm_exercises start {exercise.id}"
    )


def _check(exercise_id: str, objects: Sequence[Any], session: Session) -> Shown:
    from minillm_exercises.capture import save_function  # ast and linecache: only when needed

    exercise = session.find(exercise_id)
    if objects:
        save_function(exercise, objects, session.workspace)
    notice = session.progress().notice
    if not session.workspace.begun(exercise):
        return message(_not_begun(exercise))
    verdict = session.run(exercise)
    entry = session.progress().of(exercise.id)
    told = explain(exercise, verdict, entry, Cell(), session.suggestion())
    shown = Shown(told.text(), _html(told), told.passed)
    if notice:
        return Shown(f"{notice}\n{shown.text}", _paragraph(notice) + shown.html, told.passed)
    return shown


def hint_here(exercise_id: str, session: Session | None = None) -> Shown:
    """The next hint of an exercise, below those already seen; never raises."""
    try:
        session = session or Session.open()
        exercise = session.find(exercise_id)
        shown, _ = session.take_hint(exercise)
    except MinillmError as error:
        return message(str(error))
    except Exception as error:
        return message(f"No hint for {exercise_id}: {type(error).__name__}: {error}")
    lines = [f"Hint {n} of 3: {text}" for n, text in enumerate(exercise.hints[:shown], 1)]
    last = shown == len(exercise.hints)
    lines.append("That was the last." if last else f'Another: hint("{exercise.id}")')
    return Shown("\n".join(lines), "".join(_paragraph(line) for line in lines))


class Page(Shown):
    """Markdown, shown as a page where there is one."""

    def _repr_markdown_(self) -> str:
        return self.text

    def _repr_html_(self) -> None:  # type: ignore[override]
        return None


def task_here(exercise_id: str, session: Session | None = None) -> Shown:
    """The task of an exercise and the file to begin with, as Markdown. Never raises."""
    try:
        return _task((session or Session.open()).find(exercise_id))
    except MinillmError as error:
        return message(str(error))
    except Exception as error:
        return message(f"No task for {exercise_id}: {type(error).__name__}: {error}")


def _task(exercise: Exercise) -> Page:
    names = ", ".join(name for name in exercise.names if "." not in name)
    starter = exercise.starter.read_text(encoding="utf-8").strip()
    parts = [
        f"**{exercise.id} · {exercise.title}** ({exercise.length})",
        task(exercise),
        f'Begin with this code in a new cell, and grade it with `check("{exercise.id}", {names})`:',
        f"```python\n{starter}\n```",
    ]
    return Page("\n\n".join(parts), "")


def message(text: str) -> Shown:
    """A sentence, where there is no verdict to show."""
    return Shown(text, _paragraph(text))


def _paragraph(text: str, style: str = "") -> str:
    return f'<p style="margin:0.3em 0;{style}">{escape(text)}</p>'


def _html(told: Explained) -> str:
    """The verdict as a page: signs and words, so that it also works without colour."""
    rows = "".join(
        f'<tr><td style="{CELL};color:{colour}">{sign} {line.word}</td>'
        f'<td style="{CELL}">{escape(line.task)}</td><td style="{CELL}">{line.points}</td></tr>'
        for line in told.lines
        for status, sign, colour in SIGNS
        if status == line.status
    )
    parts = [_paragraph(told.title, "font-weight:bold"), f"<table>{rows}</table>" if rows else ""]
    parts += [_trouble(trouble) for trouble in told.troubles]
    if told.printed:
        parts += [_paragraph("Your code printed:"), f"<pre>{escape(told.printed)}</pre>"]
    parts += [_paragraph(told.summary, "font-weight:bold")]
    return "<div>" + "".join([*parts, *map(_paragraph, told.advice)]) + "</div>"


def _trouble(trouble: Trouble) -> str:
    head = _paragraph(trouble.task, "font-weight:bold") if trouble.task else ""
    body = f'<pre style="white-space:pre-wrap;margin:0.3em 0">{escape(trouble.message)}</pre>'
    where = f"<p>Your <code>{escape(trouble.where)}</code></p>" if trouble.where else ""
    known = f"Perhaps: {trouble.misconception}" if trouble.misconception else ""
    return head + body + where + (_paragraph(known) if known else "")
