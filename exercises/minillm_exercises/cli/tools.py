"""watch, report, doctor, quiz and engine: what drives the other modules from a terminal."""

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from minillm.errors import MinillmError
from minillm_exercises.assemble import assemble, run_engine
from minillm_exercises.board import STYLES, mark
from minillm_exercises.cli.app import App
from minillm_exercises.cli.learn import show_board, show_hints, show_verdict
from minillm_exercises.doctor import Finding, examine
from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise
from minillm_exercises.quiz import Question, load_quiz
from minillm_exercises.scores import grade_begun, junit, report
from minillm_exercises.watch import Watcher, keyboard
from minillm_exercises.workspace import shown_path, writing

LEVELS = (("ok", "pass"), ("note", "not run"), ("problem", "fail"))
LETTERS = "abcdefgh"


def command_watch(args: Namespace, app: App) -> int:
    """Grade the file after each save."""
    exercise = app.session.current(args.id)
    watcher = watcher_for(exercise, app)
    with keyboard() as wait:
        return int(not watcher.watch(wait, keys=sys.stdin.isatty()))


def watcher_for(exercise: Exercise, app: App) -> Watcher:
    """A watcher whose screens are this terminal's."""
    session = app.session

    def grade(current: Exercise) -> bool:
        try:
            verdict = session.run(current)
        except MinillmError as error:
            app.show(str(error))
            return False
        show_verdict(current, verdict, app)
        return verdict.status == "pass"

    def following(current: Exercise) -> Exercise | None:
        row = session.suggestion()
        return row.exercise if row else None

    def path(current: Exercise) -> Path:
        file = session.workspace.file(current)
        return file if current.id in begun else begun.setdefault(current.id, session.start(current))

    begun: dict[str, Path] = {}
    return Watcher(
        exercise,
        grade=grade,
        hint=lambda current: show_hints(current, app),
        board=lambda: show_board(app),
        path=path,
        following=following,
        say=app.show,
        clear=app.out.clear,
    )


def command_report(args: Namespace, app: App) -> int:
    """Grade everything begun and write the report."""
    session = app.session
    graded = grade_begun(session, args.seed, lambda e: app.aside(f"grading {e.id} ..."))
    data = report(session, graded, args.seed)
    text = json.dumps(data, indent=1) + "\n"
    if args.json == "-":
        app.out.file.write(text)
    elif args.json:
        _write(args.json, text, app)
    if args.junit:
        _write(args.junit, junit(data["tests"]), app)
    if args.json != "-":
        _table(data, app)
    return int(data["status"] != "pass")


def _write(name: str, text: str, app: App) -> None:
    path = Path(name)
    with writing(path):
        path.write_text(text, encoding="utf-8")
    app.aside(f"Written: {shown_path(path)}")


def _table(data: dict[str, Any], app: App) -> None:
    for name, found in data["exercises"].items():
        sign = mark("pass" if found["status"] == "pass" else "fail", app.out)
        app.show(Text(f"{sign} {name}  {found['earned']}/{found['max']}  {found['status']}"))
    score = data["score"]
    app.show(f"{score['earned']} of {score['max']} points, {data['summary']}.")
    if "message" in data:
        app.show(data["message"])


def command_doctor(args: Namespace, app: App) -> int:
    """Look at the machine."""
    problems = 0
    for finding in examine(app.session):
        problems += finding.level == "problem"
        _show_finding(finding, app)
    app.show("", f"{problems} problem{'s' * (problems != 1)}." if problems else "All is well.")
    return int(problems > 0)


def _show_finding(finding: Finding, app: App) -> None:
    look = dict(LEVELS)[finding.level]
    level = (f"{mark(look, app.out)} {finding.level:<7}", STYLES[look])
    app.out.print(Text.assemble(level, f"  {finding.about:<10} {finding.said}"))
    if finding.remedy:
        app.out.print(Text(f"             {finding.remedy}"))


def command_quiz(args: Namespace, app: App) -> int:
    """Ask a chapter's questions, or judge the answers that were given with the command."""
    chapter = args.chapter.zfill(2)
    questions = load_quiz(chapter)
    letters = " ".join(args.answers).lower().replace(",", " ").split()
    if len(letters) > len(questions):
        raise ExerciseError(
            f"There are {len(questions)} questions and {len(letters)} answers; give one letter "
            f"each, for instance: quiz {chapter} a b c."
        )
    if letters:
        return _judge(questions, letters, app)
    if not sys.stdin.isatty():
        app.show(*(q.asked(n) for n, q in enumerate(questions, 1)))
        app.show(f"Answer with: {app.shell.do('quiz', chapter, 'a', 'b', 'c')}")
        return 0
    return _ask(questions, app)


def _judge(questions: Sequence[Question], letters: Sequence[str], app: App) -> int:
    pairs = list(zip(questions, letters, strict=False))
    lines = [q.answered(n, x) for n, (q, x) in enumerate(pairs, 1) if x != "-"]
    right = sum(q.answer == x for q, x in pairs)
    app.show(*lines, f"{right} of {len(questions)} right.")
    return int(right < len(questions))


def _ask(questions: Sequence[Question], app: App) -> int:
    """Question by question at a terminal; an answer that is no option is asked for again."""
    right = 0
    for number, question in enumerate(questions, 1):
        app.show(question.asked(number))
        allowed = LETTERS[: len(question.options)]
        try:
            while (said := app.ask("> ").strip().lower()) not in tuple(allowed):
                app.show(f"One of {', '.join(allowed)}, or Ctrl-D to stop.")
        except EOFError:
            app.show("")
            break
        right += said == question.answer
        app.show(question.answered(number, said), "")
    app.show(f"{right} of {len(questions)} right.")
    return int(right < len(questions))


def command_engine(args: Namespace, app: App) -> int:
    """Put the passed exercises together and serve prompts with them."""
    file, lines = assemble(app.session)
    app.show(*lines, "")
    app.out.file.flush()
    return run_engine(file, args.prompts)[0]
