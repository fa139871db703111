"""What an instructor types: report, verify, grade, room, release."""

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from minillm_exercises.board import mark
from minillm_exercises.cli.app import App
from minillm_exercises.errors import ExerciseError
from minillm_exercises.gradebook import as_csv, as_json, grade_class
from minillm_exercises.manifest import exercises_root
from minillm_exercises.room import read_reports, room_page
from minillm_exercises.scores import grade_begun, junit, report
from minillm_exercises.workspace import shown_path, writing

PRIVATE = ("_solutions", "__pycache__", ".ipynb_checkpoints", "*.egg-info", "*.pyc")

Told = Callable[[int, int, str], None]


@contextmanager
def progress_bar() -> Iterator[Told]:
    """A bar on standard error, gone when it is done; nothing where that is no terminal."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}", markup=False))
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, of, what: bar.update(task, completed=done, total=of, description=what)


def command_report(args: Namespace, app: App) -> int:
    """Grade everything begun and write the report."""
    session = app.session
    graded = grade_begun(session, args.seed, lambda e: app.aside(f"grading {e.id} ..."))
    data = report(session, graded, args.seed)
    text = json.dumps(data, indent=1) + "\n"
    if args.json == "-":
        app.out.file.write(text)
    elif args.json:
        app.write(args.json, text)
    if args.junit:
        app.write(args.junit, junit(data["tests"]))
    if args.json != "-":
        _table(data, app)
    return int(data["status"] != "pass")


def _table(data: dict[str, Any], app: App) -> None:
    for name, found in data["exercises"].items():
        sign = mark("pass" if found["status"] == "pass" else "fail", app.out)
        app.show(Text(f"{sign} {name}  {found['earned']}/{found['max']}  {found['status']}"))
    score = data["score"]
    app.show(f"{score['earned']} of {score['max']} points, {data['summary']}.")
    if "message" in data:
        app.show(data["message"])


def command_verify(args: Namespace, app: App) -> int:
    """Prove the graders: starters fail, solutions pass, mutants fail with their own message."""
    from minillm_exercises.verify import verify  # only this command needs it

    ids = [app.session.find(name).id for name in args.ids] or [*app.session.manifest]
    count, lines = len(ids), []

    def done(line: str) -> None:
        lines.append(line)
        told(len(lines), count, line)

    with progress_bar() as told:
        told(0, count, "")
        problems = verify(dict(app.session.manifest), ids, done)
    app.show(*lines, *(str(problem) for problem in problems))
    if problems:
        app.show("", f"{len(problems)} problems in {count} exercises.")
        return 1
    app.show(f"{count} exercises verified: every grader tells right from wrong.")
    return 0


def command_grade(args: Namespace, app: App) -> int:
    """Grade a folder of submissions."""
    chosen = [app.session.find(name).id for name in args.only or app.session.manifest]
    manifest = {name: app.session.manifest[name] for name in chosen}
    with progress_bar() as told:
        results = grade_class(args.folder, manifest, args.hidden, args.seed, told)
    table = as_csv(results)
    if args.json:
        app.write(args.json, json.dumps(as_json(results, args.seed), indent=1) + "\n")
    if args.out:
        app.write(args.out, table)
    else:
        app.out.file.write(table)
    return 0


def command_room(args: Namespace, app: App) -> int:
    """Write the page of a room."""
    reports, bad = read_reports(args.folder)
    app.write(args.out, room_page(reports, bad, [*app.session.manifest.values()]))
    app.show(*bad)
    return 0


def command_release(args: Namespace, app: App) -> int:
    """Copy the exercises without what a learner should not have."""
    source, out = exercises_root(), args.out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExerciseError(f"{out} is not empty; give a new folder.")
    if out.resolve().is_relative_to(source):
        raise ExerciseError(f"{out} is inside the exercises; give a folder elsewhere.")
    with writing(out):
        shutil.copytree(source, out, ignore=shutil.ignore_patterns(*PRIVATE), dirs_exist_ok=True)
    count = len(app.session.manifest)
    app.show(
        f"{shown_path(out)}: {count} exercises without solutions.",
        "Learners with minillm installed run it with PYTHONPATH set to that folder.",
    )
    return 0
