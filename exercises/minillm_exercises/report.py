"""What `check` and `hint` show in a notebook; where there is no page, a log shows it as text."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from minillm.errors import MinillmError
from minillm_exercises.explain import Cell, advice
from minillm_exercises.manifest import Exercise
from minillm_exercises.readme import task
from minillm_exercises.results import Verdict
from minillm_exercises.session import Session
from minillm_exercises.wording import PAGE_COLUMNS

STARTER = """\
<button data-code="{code}" onclick="(async () => {{
  const lab = window.jupyterapp;
  if (!lab) return void (this.textContent = 'This page cannot add cells: copy the code above.');
  await lab.commands.execute('notebook:insert-cell-below');
  const cell = lab.shell.currentWidget.content.activeCell;
  cell.model.sharedModel.setSource(this.dataset.code);
}})()">Put the starter into the next cell</button>"""
PRE = '<pre style="white-space:pre-wrap;margin:0.3em 0">{code}</pre>'


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


@dataclass(frozen=True, repr=False)
class Page(Shown):
    """Markdown, shown as a page where there is one; `starter` is the code to begin with."""

    starter: str = ""

    def _repr_markdown_(self) -> str:
        return self.text

    def _repr_html_(self) -> None:  # type: ignore[override]
        return None

    @property
    def button(self) -> str:
        """What puts the starter, and the call that grades it, into a cell of JupyterLab."""
        return STARTER.format(code=escape(self.starter))


def lines(*texts: str) -> Shown:
    """Sentences below each other."""
    paragraphs = (f'<p style="margin:0.3em 0;">{escape(text)}</p>' for text in texts)
    return Shown("\n".join(texts), "".join(paragraphs))


def check_here(exercise_id: str, *objects: Any, session: Session | None = None) -> Shown:
    """Grade an exercise from a notebook, after saving `objects` (the function or class that was
    written there) into the learner's file. Whatever goes wrong becomes the text that is shown.
    """
    return _told(f"{exercise_id} could not be graded", _check, exercise_id, session, objects)


def hint_here(exercise_id: str, session: Session | None = None) -> Shown:
    """The next hint of an exercise, below those already seen; never raises."""
    return _told(f"No hint for {exercise_id}", _hints, exercise_id, session)


def task_here(exercise_id: str, session: Session | None = None) -> Shown:
    """The task of an exercise and the file to begin with, as Markdown. Never raises."""
    return _told(f"No task for {exercise_id}", _task, exercise_id, session)


def _told(
    failed: str, what: Callable[..., Shown], exercise_id: str, session: Session | None, *more: Any
) -> Shown:
    """What `what` shows of an exercise; a notebook runs on, and a traceback of ours would teach
    nothing."""
    try:
        session = session or Session.open()
        return what(session.find(exercise_id), session, *more)
    except MinillmError as error:
        return lines(str(error))
    except Exception as error:
        return lines(f"{failed}: {type(error).__name__}: {error}")


def _check(exercise: Exercise, session: Session, objects: Sequence[Any]) -> Shown:
    from minillm_exercises.capture import save_function  # ast and linecache: only when needed

    if objects:
        save_function(exercise, objects, session.workspace)
    notice = session.progress().notice
    if not session.workspace.begun(exercise):
        return lines(_not_begun(exercise))
    shown = _verdict(exercise, session.run(exercise), session)
    if not notice:
        return shown
    return Shown(f"{notice}\n{shown.text}", lines(notice).html + shown.html, shown.passed)


def _not_begun(exercise: Exercise) -> str:
    """Where the task is, and both ways to begin."""
    names = [name for name in exercise.names if "." not in name]  # a method comes with its class
    return (
        f"{exercise.id}, {exercise.title} ({exercise.length}), is not begun. "
        f'task("{exercise.id}") shows the task. Write {" and ".join(names)} in a cell and then '
        f'check("{exercise.id}", {", ".join(names)}), or work in a file: '
        f"python -m minillm_exercises start {exercise.id}"
    )


def _verdict(exercise: Exercise, verdict: Verdict, session: Session) -> Shown:
    """The screen of a terminal, on a page."""
    from rich.console import Console  # only when something is graded

    from minillm_exercises.board import advised, verdict_screen

    page = Console(
        file=io.StringIO(), record=True, width=PAGE_COLUMNS, color_system="truecolor",
        force_terminal=True, force_jupyter=False, highlight=False, markup=False, emoji=False,
    )  # fmt: skip
    page.print(verdict_screen(exercise, verdict, page))
    entry = session.progress().of(exercise.id)
    for line in advice(exercise, verdict, entry, Cell(), session.suggestion()):
        page.print(advised(line), soft_wrap=True)
    html = page.export_html(inline_styles=True, code_format=PRE, clear=False)
    text, html = (re.sub(" +$", "", x, flags=re.M).rstrip() for x in (page.export_text(), html))
    return Shown(text, html, verdict.status == "pass")


def _hints(exercise: Exercise, session: Session) -> Shown:
    shown, _ = session.take_hint(exercise)
    said = [f"Hint {n} of 3: {text}" for n, text in enumerate(exercise.hints[:shown], 1)]
    last = shown == len(exercise.hints)
    return lines(*said, "That was the last." if last else f'Another: hint("{exercise.id}")')


def _task(exercise: Exercise, session: Session) -> Page:
    names = ", ".join(name for name in exercise.names if "." not in name)
    starter = exercise.starter.read_text(encoding="utf-8").strip()
    parts = [
        f"**{exercise.id} · {exercise.title}** ({exercise.length})",
        task(exercise),
        f'Begin with this code in a new cell, and grade it with `check("{exercise.id}", {names})`:',
        f"```python\n{starter}\n```",
    ]
    return Page("\n\n".join(parts), "", starter=f'{starter}\n\ncheck("{exercise.id}", {names})')
