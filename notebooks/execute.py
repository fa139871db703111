#!/usr/bin/env python3
"""Execute chapters one after the other, each in a fresh kernel and an empty folder, and commit
what came out: outputs, measured numbers, and the numbers that the prose is bound to."""

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import index
import prose
import stale
from chapters import (
    NOTEBOOKS,
    ChapterError,
    Notebook,
    Run,
    build_font_list,
    chapter_paths,
    code_cells,
    facts,
    is_fact_cell,
    number,
    read_notebook,
    run,
    script_errors,
    tags,
    write_notebook,
    write_text,
)
from minillm_exercises.cli.parser import Parser
from minillm_exercises.disturbance import LIMIT

EXAMPLES = """examples:
  python notebooks/execute.py               every chapter
  python notebooks/execute.py 03            chapter 03
  python notebooks/execute.py 03 --check    say what would change, write nothing
  python notebooks/execute.py 03 --fill     only bind the prose to what is committed (no kernel)
  python notebooks/execute.py --index       only write notebooks/README.md and its figures
  python notebooks/execute.py --stale       list chapters whose numbers are older than their code
  python notebooks/execute.py --stale 03    measure chapter 03 again, and compare with its results
"""
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
ANY_MACHINE = "MINILLM_ANY_MACHINE"  # set while writing: numbers of a busy machine are accepted
SECONDS = 60  # what a chapter may take on two cores


def machine() -> dict[str, Any]:
    """What the numbers depend on, without a name or a path of the machine."""
    import numpy
    import torch

    from minillm.ops import instruction_sets
    from minillm.plan import machine as this

    return {
        "name": this.cpu_name(),
        "cores": this.cpu_count(),
        "memory_gib": round(this.total_memory_bytes() / 2**30),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__.split("+")[0],
        "numpy": numpy.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": this.cpu_has_bf16(),
        "instruction_set": getattr(instruction_sets.chosen(), "name", "none"),
    }


def normalise(notebook: Notebook) -> list[str]:
    """Remove from an executed chapter what differs from run to run and means nothing, in place.

    Returns one sentence for each thing that may not be committed and cannot be removed.
    """
    problems = []
    known = notebook["metadata"]
    notebook["metadata"] = {
        "kernelspec": dict(KERNELSPEC),
        "language_info": {"name": "python"},
        "minillm": known.get("minillm", {}),
    }
    for position, cell in code_cells(notebook):
        cell["metadata"] = {"tags": tags(cell)} if tags(cell) else {}
        facts_only = is_fact_cell(cell) and not {"open", "turn"} & set(tags(cell))
        if facts_only or "import *" in cell["source"]:  # a reader opens it with a click
            cell["metadata"]["jupyter"] = {"source_hidden": True}
        if "repeats" in tags(cell):  # numbers of the table above, which prose is bound to
            cell["metadata"].setdefault("jupyter", {})["outputs_hidden"] = True
        warned = "".join(o["text"] for o in cell["outputs"] if o.get("name") == "stderr")
        if warned.strip():
            problems.append(f"cell {position} wrote to stderr, remove the cause: {warned.strip()}")
        cell["outputs"] = merged([o for o in cell["outputs"] if worth_keeping(o)])
    return problems


def worth_keeping(output: dict[str, Any]) -> bool:
    """Not warnings, and no widgets, which show nothing once their kernel is gone."""
    widget = any("widget-view" in mime for mime in output.get("data", {}))
    return output.get("name") != "stderr" and not widget


def merged(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Pieces of one stream that follow each other as one: how they were cut is chance."""
    found: list[dict[str, Any]] = []
    for output in outputs:
        stream = output["output_type"] == "stream"
        if stream and found and found[-1].get("name") == output["name"]:
            found[-1]["text"] += output["text"]
        else:
            found.append(output)
    return found


def read_records(path: Path) -> dict[str, dict[str, Any]]:
    """What record() appended, by name.

    Raises:
        ChapterError: one name was recorded twice.
    """
    values: dict[str, dict[str, Any]] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for entry in map(json.loads, lines):
        name = entry.pop("name")
        if name in values:
            raise ChapterError(f"record({name!r}) was called twice: give each number its own name.")
        values[name] = entry
    return values


def undisturbed(name: str, values: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The recorded numbers, without the share of other programs, which was small.

    Raises:
        ChapterError: other programs took too much of the machine.
    """
    shares = {each: entry.pop("others", 0.0) for each, entry in values.items()}
    worst = max(shares, key=shares.__getitem__, default="")
    if worst and shares[worst] > LIMIT and not os.environ.get(ANY_MACHINE):
        raise ChapterError(
            f"{name} was left as it is: other programs took {shares[worst]:.0%} of this machine "
            f"while {worst!r} was measured. Stop them and run it again; {ANY_MACHINE}=1 accepts "
            f"such numbers."
        )
    return values


def execute(path: Path, console: Console, check: bool, timeout: float) -> list[str]:
    """Execute one chapter and write it with its results, or with `check` write nothing.

    Returns what is wrong or would change, one sentence each.

    Raises:
        ChapterError: a cell failed; nothing was written.
    """
    old = read_notebook(path)
    done, values = recorded(path, old, console, timeout)
    if not check:
        undisturbed(path.name, values)
    new = done.notebook
    problems = normalise(new)
    results = {
        "chapter": number(path),
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "timed": stale.fingerprints(old["metadata"].get("minillm", {})),
        "values": values,
    }
    sources = prose.Sources.of(new, results, prose.load_claims(path.parent))
    problems += prose.fill(new, sources)
    say_times(console, path, new, done.seconds)
    if check:
        return problems + changes(old, new)
    write_notebook(path, new)
    if values:
        write_results(path, results)
    else:
        results_of(path).unlink(missing_ok=True)
    return problems


def results_of(path: Path) -> Path:
    """Where a chapter's results are."""
    return path.parent / "results" / f"{path.stem}.json"


def write_results(path: Path, results: dict[str, Any]) -> None:
    """Write a chapter's results."""
    write_text(results_of(path), json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def recorded(
    path: Path, notebook: Notebook, console: Console, timeout: float
) -> tuple[Run, dict[str, dict[str, Any]]]:
    """Run the chapter in an empty folder, under a progress bar that names the cell being executed;
    returns also what it recorded.

    Raises:
        ChapterError: a cell failed, or one name was recorded twice.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=console, transient=True) as bar,
        tempfile.TemporaryDirectory(prefix="minillm-chapter-") as name,
    ):
        task = bar.add_task(path.stem, total=len(notebook["cells"]))

        def on_cell(position: int) -> None:
            bar.update(task, completed=position, description=f"{path.stem} cell {position}")

        records, folder = Path(name, "records.jsonl"), Path(name, "cwd")
        folder.mkdir()
        settings = {"MINILLM_RESULTS": str(records), "MINILLM_QUICK": ""}
        try:
            done = run(notebook, folder, timeout=timeout, on_cell=on_cell, **settings)
        except ChapterError as error:
            raise ChapterError(f"{path.name} was left as it is. {error}") from None
        return done, read_records(records)


def renew(path: Path, console: Console, timeout: float) -> list[str]:
    """Measure a chapter again and renew its fingerprints if all numbers are within their bands.

    Returns one sentence for each number outside of its band; then nothing was written.

    Raises:
        ChapterError: there is nothing to compare with, a cell failed, or other programs disturbed
            the run.
    """
    notebook = read_notebook(path)
    about = notebook["metadata"].get("minillm", {})
    results = prose.load_results(path.stem, path.parent)
    if not results or not about.get("bands"):
        raise ChapterError(
            f"{path.stem} has no recorded results, or no bands to compare new ones with: execute "
            f"it again: python notebooks/execute.py {number(path)}"
        )
    values = undisturbed(path.name, recorded(path, notebook, console, timeout)[1])
    found = stale.outside(about["bands"], results["values"], values)
    if not found:
        write_results(path, results | {"timed": stale.fingerprints(about)})
    return found


def older(path: Path, console: Console, measure: bool, timeout: float) -> list[str]:
    """Say whether a chapter's numbers are older than their code, and `measure` them again if they
    are. Returns what keeps them old, one sentence each."""
    about = read_notebook(path)["metadata"].get("minillm", {})
    names = stale.changed(about, prose.load_results(path.stem, path.parent))
    if not names:
        return []
    said = f"changed since it was measured: {', '.join(names)}"
    if not measure:
        return [f"{said}. Measure again: make stale CHAPTER={number(path)}"]
    console.print(f"{path.stem}: {said}", highlight=False, markup=False)
    if found := renew(path, console, timeout):
        return [*found, f"execute it again: python notebooks/execute.py {number(path)}"]
    console.print(f"{path.stem}: all numbers are within their bands; fingerprints renewed")
    return []


def say_times(console: Console, path: Path, notebook: Notebook, seconds: dict[int, float]) -> None:
    """Seconds of the chapter, and its slowest cells when they are worth knowing."""
    total = sum(seconds.values())
    over = f"  [bold]over the {SECONDS} s that a chapter may take[/bold]" if total > SECONDS else ""
    console.print(f"{path.stem}: {total:.1f} s in {len(seconds)} cells{over}", highlight=False)
    for position in sorted(seconds, key=seconds.get, reverse=True)[:3]:  # type: ignore[arg-type]
        if seconds[position] > 1:
            first = notebook["cells"][position]["source"].strip().split("\n")[0]
            text = f"    {seconds[position]:5.1f} s  cell {position}: {first[:70]}"
            console.print(text, highlight=False, markup=False)


def changes(old: Notebook, new: Notebook) -> list[str]:
    """What a fresh run says differently: the facts, and the prose bound to them."""
    before, after = facts(old), facts(new)
    found = [
        f"the fact {name!r} is committed as {before.get(name, 'nothing')}, and now it is "
        f"{after.get(name, 'gone')}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]

    def words(cell: dict[str, Any]) -> str:  # measured numbers are new each time
        return prose.SPAN.sub(lambda m: "" if m["kind"] == "result" else m[0], cell["source"])

    pairs = zip(old["cells"], new["cells"], strict=True)
    for position, (was, now) in enumerate(pairs):
        if was["cell_type"] == "markdown" and words(was) != words(now):
            found.append(f"cell {position}: the prose is not bound to the present values")
    return found


def fill_only(path: Path) -> list[str]:
    """Bind the prose to the committed facts and results, and listings to the present source,
    without running anything else."""
    notebook = read_notebook(path)
    prose.renew_listings(notebook)
    results, claims = prose.load_results(path.stem, path.parent), prose.load_claims(path.parent)
    problems = prose.fill(notebook, prose.Sources.of(notebook, results, claims))
    write_notebook(path, notebook)
    return problems


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="execute.py", description=__doc__, epilog=EXAMPLES)
    parser.add_argument("chapters", nargs="*", help="numbers or files; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if facts changed")
    parser.add_argument("--fill", action="store_true", help="only fill the spans of the prose")
    parser.add_argument("--index", action="store_true", help="only write README.md and its figures")
    parser.add_argument("--stale", action="store_true", help="are numbers older than their code?")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one cell (300)")
    parser.add_argument("--folder", type=Path, default=NOTEBOOKS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Execute what the command line names; 0 if everything is in order."""
    given = arguments(argv)
    console = Console(stderr=False, soft_wrap=True)
    paths = chapter_paths(given.folder, tuple(given.chapters))
    if not paths:
        raise ChapterError(f"There is no chapter in {given.folder.name}/ yet.")
    bad = 0
    build_font_list()
    for path in [] if given.index else paths:
        if given.fill:
            problems = fill_only(path)
        elif given.stale:
            problems = older(path, console, bool(given.chapters), given.timeout)
        else:
            problems = execute(path, console, given.check, given.timeout)
        for problem in problems:
            console.print(f"  {path.stem}: {problem}", highlight=False, markup=False)
        bad += len(problems)
    if given.stale and not bad:
        console.print("No chapter's numbers are older than the code they time.")
    if not (given.check or given.fill or given.stale):
        index.write(given.folder)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(script_errors(main))
