"""A page that shows how far a room is, from the files that learners write with `report --json`."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise

PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>How far the room is</title><style>
:root {{ color-scheme: light dark; }} body {{ margin: 2rem; font: 15px/1.5 system-ui, sans-serif; }}
table {{ border-collapse: collapse; font-size: 0.85em; }} th {{ background: Canvas; }}
th, td {{ border: 1px solid #8886; padding: 0.1em 0.35em; text-align: center; }}
th:first-child {{ text-align: left; white-space: nowrap; position: sticky; left: 0; }}
.pass {{ background: #009e7355; }} .begun {{ background: #e69f0055; }}
</style></head><body>
<h1>How far the room is</h1>
<p>Reports: {people}. Green: passed. Orange: points so far. Point at a cell for tries and hints.</p>
<table><tr><th></th>{head}<th>points</th></tr>
{rows}
<tr><th>passed</th>{passed}<td></td></tr>
<tr><th>hints opened</th>{hints}<td></td></tr></table>
{bad}</body></html>
"""


@dataclass(frozen=True)
class Report:
    """What one learner's file says, by exercise: passed (1) or not (0), points, tries, hints."""

    name: str
    passed: Mapping[str, int]
    earned: Mapping[str, int]
    attempts: Mapping[str, int]
    hints: Mapping[str, int]


def read_report(path: Path, name: str) -> Report:
    """A learner's report.

    Raises:
        ExerciseError: the file is not one; the message says why.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExerciseError(f"{name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ExerciseError(f"{name} is no JSON, or was cut off: ask for it again.") from None
    try:
        done = data["exercises"].items()
        passed = {key: int(found["status"] == "pass") for key, found in done}
        earned = {key: int(found["earned"]) for key, found in done}
        told = [{key: int(n) for key, n in data[kind].items()} for kind in ("attempts", "hints")]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ExerciseError(f"{name} is not what `report --json` writes.") from None
    return Report(name, passed, earned, *told)


def read_reports(folder: Path) -> tuple[list[Report], list[str]]:
    """The reports of all JSON files in a folder and below, named by their files, and a sentence for
    each file that is none.

    Raises:
        ExerciseError: there is no such folder, or no report in it.
    """
    if not folder.is_dir():
        raise ExerciseError(f"There is no folder {str(folder)!r}; give one with the reports.")
    reports, bad = [], []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).with_suffix("").as_posix().removesuffix("/report")
        try:
            reports.append(read_report(path, name))
        except ExerciseError as error:
            bad.append(str(error))
    if not reports:
        said = " ".join(bad) or "It has no .json files."
        raise ExerciseError(f"{folder} has no report: `report --json NAME.json` writes one. {said}")
    return reports, bad


def room_page(reports: Sequence[Report], bad: Sequence[str], exercises: Sequence[Exercise]) -> str:
    """The page: a row for each learner, a column for each exercise that anybody has begun."""
    passed, hints = Counter[str](), Counter[str]()
    for report in reports:
        passed.update(report.passed)
        hints.update(report.hints)
    titles = {e.id: escape(e.title) for e in exercises if e.id in passed}

    def cell(report: Report, key: str) -> str:
        if key not in report.passed:
            return "<td></td>"
        earned, kind = report.earned[key], ("begun", "pass")[report.passed[key]]
        told = f"{report.attempts.get(key, 0)} attempts, {report.hints.get(key, 0)} hints"
        shown = "✓" if kind == "pass" else earned
        return f'<td class="{kind}" title="{key}: {earned} points, {told}">{shown}</td>'

    def row(report: Report) -> str:
        cells = "".join(cell(report, key) for key in titles)
        total = sum(report.earned.values())
        return f"<tr><th>{escape(report.name)}</th>{cells}<td>{total}</td></tr>"

    return PAGE.format(
        people=len(reports),
        head="".join(f'<th title="{title}">{key}</th>' for key, title in titles.items()),
        rows="\n".join(map(row, reports)),
        passed="".join(f"<td>{passed[key] or ''}</td>" for key in titles),
        hints="".join(f"<td>{hints[key] or ''}</td>" for key in titles),
        bad="".join(f"<p>Left out: {escape(sentence)}</p>\n" for sentence in bad),
    )
