"""The page of a room, from the reports of its people and from files that are none."""

import json
from pathlib import Path

import pytest

from tests.course.small import MUTANT, SOLUTION, Terminal


@pytest.fixture
def reports(at: Terminal, tmp_path: Path) -> Path:
    """Anna has passed one exercise, Ben is at it; as the command itself writes it."""
    folder = tmp_path / "reports"
    folder.mkdir()
    at.write(SOLUTION)
    at.type("report", "--json", str(folder / "anna.json"))
    at.write(MUTANT)
    at.write("nonsense(", "e90.2")
    at.type("hint", "e90.1")
    (folder / "ben").mkdir()
    at.type("report", "--json", str(folder / "ben" / "report.json"))
    return folder


def page_of(at: Terminal, folder: Path) -> tuple[str, str]:
    """The page, and what was said."""
    out = folder.parent / "room.html"
    code, said = at.type("room", str(folder), "--out", str(out))
    assert code == 0, said
    return out.read_text(), said


def test_a_row_for_each_learner(at: Terminal, reports: Path) -> None:
    page, _ = page_of(at, reports)
    assert "Reports: 2." in page
    assert '<th title="Add two numbers">e90.1</th>' in page
    ben = json.loads((reports / "ben" / "report.json").read_text())["exercises"]["e90.1"]
    assert 0 < ben["earned"] < 3
    anna_row, ben_row, *_ = (line for line in page.splitlines() if line.startswith("<tr><th>"))
    told = "e90.1: 3 points, 1 attempts, 0 hints"
    assert anna_row.startswith(f'<tr><th>anna</th><td class="pass" title="{told}">✓</td><td></td>')
    assert anna_row.endswith("<td>3</td></tr>")
    told = f"e90.1: {ben['earned']} points, 2 attempts, 1 hints"
    assert f'<tr><th>ben</th><td class="begun" title="{told}">{ben["earned"]}</td>' in ben_row
    assert "<th>passed</th><td>1</td><td></td><td></td></tr>" in page
    assert "<th>hints opened</th><td>1</td><td></td>" in page
    assert "e91.1" not in page  # nobody has begun it
    assert "Left out" not in page
    assert "http" not in page


GOOD = {"version": 3, "exercises": {}, "attempts": {}, "hints": {}}
BAD = {
    "cut": ('{"version": 3, "exercises": {"e90.1"', "is no JSON, or was cut off"),
    "binary": (b"\xff\xfe\x00", "is no JSON, or was cut off"),
    "deep": ("[" * 100_000, "is no JSON, or was cut off"),
    "list": ("[1, 2]", "is not what `report --json` writes"),
    "nbgrader": ('{"score": 3}', "is not what"),
    "entry": (json.dumps(GOOD | {"exercises": {"e90.1": 3}}), "is not what"),
    "points": (json.dumps(GOOD | {"exercises": {"e90.1": {"status": "pass", "earned": "x"}}}),
               "is not what"),
    "infinite": (json.dumps(GOOD | {"hints": {"e90.1": float("inf")}}), "is not what"),
}  # fmt: skip


def test_a_file_that_is_no_report_is_named_and_left_out(at: Terminal, reports: Path) -> None:
    for name, (content, _) in BAD.items():
        data = content if isinstance(content, bytes) else content.encode()
        (reports / f"{name}.json").write_bytes(data)
    (reports / "<b>other.json").write_text(json.dumps(GOOD | {"exercises": {}}))
    (reports / "notes.txt").write_text("no report, and not asked")
    page, said = page_of(at, reports)
    assert "Reports: 3." in page
    assert "<th>&lt;b&gt;other</th>" in page
    for name, (_, why) in BAD.items():
        (line,) = [line for line in said.splitlines() if line.startswith(f"{name} ")]
        assert why in line
        assert page.count(f"Left out: {name} ") == 1


def test_without_reports_there_is_no_page(at: Terminal, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    for folder, why in (("none", "There is no folder"), ("empty", "It has no .json files")):
        assert at.type("room", str(tmp_path / folder))[0] == 2
        assert why in capsys.readouterr().err
