"""A page that shows how far a room is, from the files that learners write with `report --json`."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from minillm_exercises.errors import ExerciseError
from minillm_exercises.manifest import Exercise

MOST_BYTES = 10_000_000  # of a report; ours have less than 100 kB
PASSED = ("begun", "pass")  # classes of cells
PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>How far the room is</title><style>
:root {{ color-scheme: light dark; }}
body {{ margin: 2rem; font: 15px/1.5 system-ui, sans-serif; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ border: 1px solid #8886; padding: 0.2em 0.5em; text-align: center; }}
th:first-child {{ text-align: left; }}
.pass {{ background: #009e7355; }} .begun {{ background: #e69f0055; }}
thead th, tfoot {{ font-weight: 600; }}
</style></head><body>
<h1>How far the room is</h1>
<p>Reports: {people}. Green is passed; an orange cell has the points so far. Point at a cell for
attempts and hints.</p>
<table><thead><tr><th></th>{head}<th>points</th></tr></thead><tbody>
{rows}
</tbody><tfoot><tr><th>passed</th>{passed}<td></td></tr><tr><th>hints opened</th>{hints}<td></td>
</tr></tfoot></table>
{bad}</body></html>
"""


@dataclass(frozen=True)
class Report:
    """What one learner's file says, by exercise: whether it is passed, points, attempts, hints."""

    name: str
    passed: Mapping[str, bool]
    earned: Mapping[str, int]
    attempts: Mapping[str, int]
    hints: Mapping[str, int]


def read_report(path: Path, name: str) -> Report:
    """A learner's report.

    Raises:
        ExerciseError: the file is not one; the message says why.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ExerciseError(f"{path.name} has more than {MOST_BYTES // 10**6} MB: no report.")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExerciseError(f"{path.name} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise ExerciseError(f"{path.name} is no JSON, or was cut off: ask for it again.") from None
    try:
        done = dict(data["exercises"])
        return Report(
            name,
            {key: found["status"] == "pass" for key, found in done.items()},
            {key: int(found["earned"]) for key, found in done.items()},
            *({key: int(n) for key, n in data[kind].items()} for kind in ("attempts", "hints")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise ExerciseError(f"{path.name} is not what `report --json` writes.") from None


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
            bad.append(f"{name}: {error}")
    if not reports:
        said = " ".join(bad) or "It has no .json files."
        raise ExerciseError(f"{folder} has no report: `report --json NAME.json` writes one. {said}")
    return reports, bad


def room_page(reports: Sequence[Report], bad: Sequence[str], exercises: Sequence[Exercise]) -> str:
    """The page: a row for each learner, a column for each exercise that anybody has begun."""
    exercises = [e for e in exercises if any(e.id in report.passed for report in reports)]

    def cell(report: Report, exercise: str) -> str:
        if exercise not in report.passed:
            return "<td></td>"
        passed, earned = report.passed[exercise], report.earned[exercise]
        attempts, hints = (counts.get(exercise, 0) for counts in (report.attempts, report.hints))
        told = f"{exercise}: {earned} points, {attempts} attempts, {hints} hints"
        return f'<td class="{PASSED[passed]}" title="{told}">{"✓" if passed else earned}</td>'

    def row(report: Report) -> str:
        cells = "".join(cell(report, e.id) for e in exercises)
        total = sum(report.earned.values())
        return f"<tr><th>{escape(report.name)}</th>{cells}<td>{total}</td></tr>"

    def totals(counts: Iterable[Mapping[str, int]]) -> str:
        sums = Counter[str]()
        for each in counts:
            sums.update(each)
        return "".join(f"<td>{sums[e.id] or ''}</td>" for e in exercises)

    return PAGE.format(
        people=len(reports),
        head="".join(f'<th title="{escape(e.title)}">{e.id}</th>' for e in exercises),
        rows="\n".join(map(row, reports)),
        passed=totals(report.passed for report in reports),
        hints=totals(report.hints for report in reports),
        bad="".join(f"<p>Left out: {escape(sentence)}</p>\n" for sentence in bad),
    )
