"""What a learner types: all commands but those of `teach`."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from rich.markdown import Markdown
from rich.syntax import Syntax
from rich.text import Text

from minillm.errors import MinillmError
from minillm_exercises.assemble import assemble, run_engine
from minillm_exercises.board import STYLES, advised, board, mark, verdict_screen
from minillm_exercises.cli.app import App
from minillm_exercises.doctor import Finding, examine
from minillm_exercises.errors import ExerciseError
from minillm_exercises.explain import advice, has_answer, next_step, summary, troubles
from minillm_exercises.manifest import Exercise
from minillm_exercises.quiz import LETTERS, Question, chapter_number, judged, load_quiz
from minillm_exercises.readme import brief
from minillm_exercises.results import Verdict
from minillm_exercises.watch import watch
from minillm_exercises.workspace import STAMP, shown_path

LEVELS = (("ok", "pass"), ("note", "not run"), ("problem", "fail"))
HINT_KINDS = ("the idea", "where to look", "the steps")


def command_list(args: Namespace, app: App) -> int:
    """The board with what comes next."""
    rows = app.session.standings()
    app.out.print(board(rows, app.out))
    app.show(*(_outdated(row.exercise, app) for row in rows if row.outdated))
    app.show(next_step(app.session.suggestion(), app.shell))
    return 0


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
    entry, following = session.progress().of(exercise.id), session.suggestion()
    path = shown_path(session.workspace.file(exercise)) if file is None else str(file)
    app.out.print(verdict_screen(exercise, verdict, app.out, path, verbose))
    for line in advice(exercise, verdict, entry, app.shell, following, verbose):
        app.out.print(advised(line), soft_wrap=True)
    if verbose:
        app.show(f"Graded in {verdict.seconds:.2f} s.")
    if session.workspace.outdated(exercise) and file is None:
        app.show(_outdated(exercise, app))


def command_watch(args: Namespace, app: App) -> int:
    """Grade the file after each save."""
    exercise = app.session.current(args.id)
    path = app.session.start(exercise)

    def grade() -> bool:
        app.out.clear()
        try:
            verdict = app.session.run(exercise)
        except MinillmError as error:  # the file has gone just now
            app.show(str(error))
            return False
        show_verdict(exercise, verdict, app)
        app.show("", f"Watching {path}; Ctrl-C stops.")
        return verdict.status == "pass"

    def gone() -> None:
        app.show(f"{path.name} is gone: save it again, or `start {exercise.id}` begins anew.")

    passed = watch(path, grade, gone, app.wait)
    app.show(f"Stopped watching {exercise.id}.")
    return int(not passed)


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
    sign = mark("pass" if verdict.status == "pass" else "fail", app.out)
    said = summary(exercise, verdict).partition(";")[0]
    app.show(Text(f"{sign} {exercise.id}  {exercise.title}: {said}."))
    for trouble in [*troubles(verdict)][:1]:
        said = " ".join(f"{trouble.task}. {trouble.message}".removeprefix(". ").split())
        app.show(Text(f"    {said}"))


def command_hint(args: Namespace, app: App) -> int:
    """The hints up to the next one, or up to the number that was asked for."""
    exercise = app.session.find(args.id)
    shown, _ = app.session.take_hint(exercise, args.number)
    for number, text in enumerate(exercise.hints[:shown], 1):
        head = f"Hint {number} of 3, {HINT_KINDS[number - 1]}: "
        app.out.print(Text.assemble((head, "bold"), text))
        app.show("")
    if shown < len(exercise.hints):
        app.show(f"Another: {app.shell.do('hint', exercise.id)}")
    else:
        app.show("That was the last.")
        if has_answer(exercise):
            app.show(f"The answer: {app.shell.do('solution', exercise.id, '--give-up')}")
    return 0


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
    chapter = chapter_number(args.chapter)
    questions = load_quiz(chapter)
    if args.answers:
        said, right = judged(questions, " ".join(args.answers), f"quiz {chapter} a b c")
        app.show(said)
        return int(not right)
    if sys.stdin.isatty():
        return _ask(questions, app)
    app.show(*(q.asked(n) for n, q in enumerate(questions, 1)))
    app.show(f"Answer with: {app.shell.do('quiz', chapter, 'a', 'b', 'c')}")
    return 0


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
