"""What a learner types: list, start, run, hint, solution, reset."""

import json
import re
from argparse import Namespace
from pathlib import Path

from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.text import Text

from minillm_exercises.board import advice, board, mark, verdict_screen
from minillm_exercises.cli.app import App
from minillm_exercises.errors import ExerciseError
from minillm_exercises.explain import explain, has_answer
from minillm_exercises.manifest import Exercise
from minillm_exercises.readme import brief
from minillm_exercises.results import Verdict
from minillm_exercises.workspace import STAMP, shown_path

HINT_KINDS = ("the idea", "where to look", "the steps")


def command_list(args: Namespace, app: App) -> int:
    """Draw the board."""
    show_board(app)
    return 0


def show_board(app: App) -> None:
    """The board with what comes next."""
    rows = app.session.standings()
    notices = [_outdated(row.exercise, app) for row in rows if row.outdated]
    following = app.session.suggestion()
    if following is None:
        notices.append("Everything that can be done here is done.")
    else:
        command = "run" if following.state == "begun" else "start"
        notices.append(f"Next: {app.shell.do(command, following.exercise.id)}")
    app.out.print(board(rows, app.out))
    app.show(*notices)


def _outdated(exercise: Exercise, app: App) -> str:
    return (
        f"{exercise.id} has a newer starter: {app.shell.do('start', exercise.id, '--new')} "
        f"puts it beside yours."
    )


def command_start(args: Namespace, app: App) -> int:
    """Give the learner a file to work on."""
    exercise = app.session.find(args.id)
    workspace = app.session.workspace
    if args.new and workspace.begun(exercise):
        return _start_new(exercise, app)
    had = workspace.begun(exercise)
    path = shown_path(app.session.start(exercise))
    if had:
        app.show(f"{path} is already there and stays as it is; `reset` begins again.")
    else:
        app.show(f"{path} is yours: {exercise.title} ({exercise.length}).")
    app.show("")
    if said := brief(exercise):
        if app.out.is_terminal:
            app.out.print(Markdown(said, code_theme="ansi_dark"))
        else:
            app.show(said)
        app.show("")
    readme = exercise.folder / "README.md"
    do = app.shell.do
    app.show(
        f"The task:     {shown_path(readme)}",
        f"Grade it:     {do('run', exercise.id)}",
        f"On each save: {do('watch', exercise.id)}",
        f"A hint:       {do('hint', exercise.id)}",
    )
    return 0


def _start_new(exercise: Exercise, app: App) -> int:
    if not app.session.workspace.outdated(exercise):
        app.show(f"Your file of {exercise.id} was begun from the newest starter.")
        return 0
    path = shown_path(app.session.workspace.start_beside(exercise))
    app.show(
        f"{path} is the newest starter; your own file is untouched.",
        "Carry over what you want, then copy its first line over yours: the notice ends.",
    )
    return 0


def command_run(args: Namespace, app: App) -> int:
    """Grade one file, or all of them."""
    if args.all:
        if args.id or args.file:
            raise ExerciseError("--all grades everything begun; give no ID and no --file with it.")
        return _run_all(args, app)
    exercise = app.session.current(args.id or (_named_by(args.file) if args.file else None))
    verdict = app.session.run(exercise, args.file)
    if args.json:
        app.show(json.dumps(verdict.to_dict(), indent=1))
    else:
        show_verdict(exercise, verdict, app, args.verbose, args.file)
    return int(verdict.status != "pass")


def _named_by(file: Path) -> str:
    """The exercise that a file says it is of, by its stamp or its name."""
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            found = STAMP.match(opened.readline())
    except OSError:
        found = None
    if found:
        return found["id"]
    if named := re.match(r"e\d\d_\d", file.name):
        return named[0]
    raise ExerciseError(f"{file} does not say which exercise it is of: `run ID --file {file}`.")


def show_verdict(
    exercise: Exercise, verdict: Verdict, app: App, verbose: bool = False, file: object = None
) -> None:
    """Draw the verdict and say what comes next."""
    session = app.session
    entry = session.progress().of(exercise.id)
    told = explain(exercise, verdict, entry, app.shell, session.suggestion(), verbose)
    path = shown_path(session.workspace.file(exercise)) if file is None else str(file)
    app.out.print(verdict_screen(told, app.out, path))
    for line in told.advice:
        app.out.print(advice(line), soft_wrap=True)
    if verbose:
        app.show(f"Graded in {verdict.seconds:.2f} s.")
    if session.workspace.outdated(exercise) and file is None:
        app.show(_outdated(exercise, app))


def _run_all(args: Namespace, app: App) -> int:
    begun = [e for e in app.session.manifest.values() if app.session.workspace.begun(e)]
    if not begun:
        raise ExerciseError("Nothing is begun yet; `start e00.1` begins the first exercise.")
    verdicts = []
    for exercise in begun:
        verdict = app.session.run(exercise)
        verdicts.append(verdict)
        if not args.json:
            _one_line(exercise, verdict, app)
    if args.json:
        app.show(json.dumps([verdict.to_dict() for verdict in verdicts], indent=1))
    else:
        passed = sum(verdict.status == "pass" for verdict in verdicts)
        app.show("", f"{passed} of {len(verdicts)} begun exercises pass.")
    return int(any(verdict.status != "pass" for verdict in verdicts))


def _one_line(exercise: Exercise, verdict: Verdict, app: App) -> None:
    """An exercise's outcome and, unless it passed, the first thing that is wrong."""
    entry = app.session.progress().of(exercise.id)
    told = explain(exercise, verdict, entry, app.shell)
    sign = mark("pass" if told.passed else "fail", app.out)
    app.show(Text(f"{sign} {told.title}: {told.summary.partition(';')[0]}."))
    for trouble in told.troubles[:1]:
        said = " ".join(f"{trouble.task}. {trouble.message}".removeprefix(". ").split())
        app.show(Text(f"    {said}"))


def command_hint(args: Namespace, app: App) -> int:
    """Show one hint more."""
    show_hints(app.session.find(args.id), app, args.number)
    return 0


def show_hints(exercise: Exercise, app: App, number: int | None = None) -> None:
    """The hints up to the next one, or up to `number`."""
    shown, _ = app.session.take_hint(exercise, number)
    give_up = app.shell.do("solution", exercise.id, "--give-up")
    for number, text in enumerate(exercise.hints[:shown], 1):
        head = f"Hint {number} of 3, {HINT_KINDS[number - 1]}: "
        app.out.print(Text.assemble((head, "bold"), text))
        app.show("")
    if shown < len(exercise.hints):
        app.show(f"Another: {app.shell.do('hint', exercise.id)}")
    else:
        app.show("That was the last.")
        if has_answer(exercise):
            app.show(f"The answer: {give_up}")


def command_solution(args: Namespace, app: App) -> int:
    """Show the reference solution to a learner who has passed or given up."""
    exercise = app.session.find(args.id)
    source = exercise.answers / ("alternate.py" if args.alternate else "solution.py")
    if not source.is_file():
        raise ExerciseError(f"This copy of the course has no {source.stem} of {exercise.id}.")
    entry = app.session.progress().of(exercise.id)
    if not (entry.passed or entry.gave_up or args.give_up):
        app.show(
            f"The solution of {exercise.id} opens once yours passes: it tells more when you have "
            f"your own to hold beside it.",
            f"A hint first: {app.shell.do('hint', exercise.id)}",
            f"To see it now: {app.shell.do('solution', exercise.id, '--give-up')}  "
            f"(that is remembered, and nothing worse)",
        )
        return 1
    if args.give_up and not entry.passed:
        app.session.progress_file.set(exercise.id, gave_up=True)
    code = source.read_text(encoding="utf-8")
    _show_code(code, app)
    if args.save:
        kept = app.session.workspace.file(exercise).with_suffix(f".{source.stem}.py")
        app.session.workspace.put(kept, code)
        app.show(f"Written to {shown_path(kept)}.")
    other = exercise.answers / "alternate.py"
    if entry.passed and not args.alternate and other.is_file():
        app.show(f"Another way: {app.shell.do('solution', exercise.id, '--alternate')}")
    return 0


def _show_code(code: str, app: App) -> None:
    """Print code, coloured in a terminal and plain in a file."""
    if app.out.is_terminal:
        app.out.print(
            Syntax(code, "python", theme="ansi_dark", background_color="default", word_wrap=True)
        )
    else:
        app.show(code)


def command_reset(args: Namespace, app: App) -> int:
    """Begin an exercise again; what was there is kept."""
    exercise = app.session.find(args.id)
    path = app.session.workspace.file(exercise)
    if not path.exists():
        raise ExerciseError(f"{exercise.id} is not begun, so there is nothing to reset.")
    question = f"Begin {exercise.id} again? {shown_path(path)} is kept in .history. [y/N] "
    if not (args.yes or _agrees(app, question)):
        app.show("Nothing was changed.")
        return 1
    kept = app.session.workspace.set_aside(path)
    app.session.start(exercise)
    app.session.progress_file.set(exercise.id, status="", earned=0)
    app.show(f"{shown_path(path)} is the starter again; your file is {shown_path(kept)}.")
    return 0


def _agrees(app: App, question: str) -> bool:
    try:
        return app.ask(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False
