"""Reports and grades: JSON, JUnit XML and CSV, and that nothing counts which was not checked."""

import csv
import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from minillm_exercises import gradebook
from minillm_exercises.scores import junit
from tests.course.small import CHECKS, MUTANT, SOLUTION, Terminal

EXERCISM_STATUS = {"pass", "fail", "error"}


def report(at: Terminal, *words: str) -> tuple[int, dict[str, Any]]:
    """The JSON report."""
    code, shown = at.type("report", "--json", "-", *words)
    return code, json.loads(shown)


def test_the_json_report(at: Terminal) -> None:
    at.write(MUTANT + "print('hello')\n")
    at.type("hint", "e90.1")
    code, data = report(at)
    assert code == 1
    assert (data["version"], data["status"]) == (3, "fail")
    assert data["score"] == {"earned": 1, "max": 9}
    assert data["hints"] == {"e90.1": 1}
    assert data["attempts"] == {"e90.1": 1}
    assert data["summary"] == "public checks 1/2; an instructor may run more"
    first, second = data["tests"]
    assert {test["status"] for test in data["tests"]} <= EXERCISM_STATUS
    assert (first["name"], first["message"]) == ("e90.1 small numbers", None)
    assert (first["points"], first["max_points"], first["task_id"]) == (1, 1, 1)
    assert (second["points"], second["max_points"]) == (0, 2)
    assert "expected 1, got 3" in second["message"]
    assert first["output"].strip() == "hello"
    assert data["exercises"]["e90.1"]["misconception"].startswith("You add the sizes")
    assert set(data["env"]) == {
        "python", "platform", "torch", "triton", "device", "minillm", "commit",
    }  # fmt: skip
    assert data["env"]["device"] == "cpu"


def test_a_pass(at: Terminal) -> None:
    at.write(SOLUTION)
    code, data = report(at, "--seed", "7")
    assert code == 0
    assert (data["status"], data["seed"]) == ("pass", 7)
    at.type("solution", "e90.2", "--give-up")
    assert report(at)[1]["gave_up"] == []  # there was no solution to show


def test_files_are_written(at, tmp_path, capsys):
    at.write(MUTANT)
    code, shown = at.type(
        "report", "--json", str(tmp_path / "new/r.json"), "--junit", str(tmp_path / "r.xml")
    )
    assert code == 1
    assert "1 of 9 points, public checks 1/2; an instructor may run more." in shown
    assert json.loads((tmp_path / "new/r.json").read_text())["version"] == 3
    suite = ET.parse(tmp_path / "r.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    assert suite[1].find("failure") is not None
    assert capsys.readouterr().err.count("Written: ") == 2


def test_xml_holds_any_text() -> None:
    test = {
        "exercise": "e90.1", "name": "a\x00b", "status": "error", "message": "<&\x1b\"'\ufffe",
        "output": "]]>\x07",
    }  # fmt: skip
    (suite,) = ET.fromstring(junit([test]).split("?>")[1])
    assert suite[0].get("name") == "ab"
    assert suite[0][0].tag == "error"


def submissions(folder: Path, **texts: str) -> Path:
    """A folder with a student for each text, who hands it in as e90.1."""
    for name, text in texts.items():
        path = folder / name / "e90_sums" / "e90_1.py"
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return folder


def grades(at: Terminal, folder: Path, *words: str) -> dict[str, dict[str, str]]:
    """The CSV by student."""
    code, shown = at.type("grade", str(folder), *words)
    assert code == 0
    return {row["student"]: row for row in csv.DictReader(shown.splitlines())}


def test_a_class_is_graded(at: Terminal, tmp_path: Path) -> None:
    folder = submissions(
        tmp_path / "class", ann=SOLUTION, bob=MUTANT, cy="def add(:\n", dee="import os\nos._exit(0)"
    )
    copied = folder / "eve" / "Downloads" / "work" / "e90_sums" / "e90_1.py"
    copied.parent.mkdir(parents=True)
    copied.write_text(SOLUTION)
    old = folder / "fay" / "work" / ".history" / "e90_1.py"
    old.parent.mkdir(parents=True)
    old.write_text(SOLUTION)
    (folder / ".hidden").mkdir()
    (folder / "readme.txt").write_text("not a student")
    found = grades(at, folder)
    assert {name: row["e90.1 status"] for name, row in found.items()} == {
        "ann": "pass", "bob": "fail", "cy": "refused", "dee": "refused", "eve": "pass",
        "fay": "missing",
    }  # fmt: skip
    assert {name: row["total"] for name, row in found.items()} == {
        "ann": "3", "bob": "1", "cy": "0", "dee": "0", "eve": "3", "fay": "0",
    }  # fmt: skip
    assert {row["max"] for row in found.values()} == {"6"}  # e91.1 cannot be graded here
    assert {row["e90.1 max"] for row in found.values()} == {"3"}


HIDDEN = CHECKS.replace("test_small", "test_large").replace(
    "equal(impl.add(1, 2), 3,", "equal(impl.add(10**6, 2), 10**6 + 2,"
)
ONLY_SMALL = """
def add(a, b):
    return {(1, 2): 3, (-1, 2): 1}.get((a, b), 0)
"""


def test_hidden_checks(at: Terminal, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "test_e90_1.py").write_text(HIDDEN)
    folder = submissions(tmp_path / "class", ann=SOLUTION, zoe=ONLY_SMALL)
    out, details = tmp_path / "out" / "grades.csv", tmp_path / "grades.json"
    code, shown = at.type(
        "grade", str(folder), "--hidden", str(secret), "--seed", "5", "--out", str(out),
        "--json", str(details), "--only", "e90.1",
    )  # fmt: skip
    assert (code, shown) == (0, "")
    rows = {row["student"]: row for row in csv.DictReader(out.read_text().splitlines())}
    assert (rows["ann"]["total"], rows["ann"]["max"]) == ("6", "6")
    assert (rows["zoe"]["e90.1"], rows["zoe"]["e90.1 status"]) == ("3", "pass")
    assert (rows["zoe"]["e90.1 hidden"], rows["zoe"]["e90.1 hidden max"]) == ("2", "3")
    data = json.loads(details.read_text())
    assert data["seed"] == 5
    zoe = data["students"][1]
    assert zoe["score"] == {"earned": 5, "max": 6}
    assert zoe["exercises"]["e90.1"]["hidden"]["checks"][0]["name"] == "test_large"


def test_the_seed_reaches_the_checks(at: Terminal, tmp_path: Path) -> None:
    at.exercise().checks.write_text(
        CHECKS.replace("import check, equal", "import check, equal, seeds").replace(
            "equal(impl.add(1, 2), 3,", "equal(impl.add(0, next(seeds(1))), 0,"
        )
    )
    folder = submissions(tmp_path / "class", ann=SOLUTION)
    messages = set()
    for seed in ("0", "1", "1"):
        details = tmp_path / f"{seed}.json"
        at.type("grade", str(folder), "--seed", seed, "--json", str(details))
        public = json.loads(details.read_text())["students"][0]["exercises"]["e90.1"]["public"]
        messages.add(public["checks"][0]["message"])
    assert len(messages) == 2


def test_a_grader_that_dies_costs_nobody_else(at, tmp_path, monkeypatch):
    real = gradebook.Grader.grade

    def grade(self: Any, file: Path, **options: Any) -> Any:
        if "bob" in str(file):
            raise OSError("disk")
        return real(self, file, **options)

    monkeypatch.setattr(gradebook.Grader, "grade", grade)
    folder = submissions(tmp_path / "class", ann=SOLUTION, bob=SOLUTION, cy=SOLUTION)
    found = grades(at, folder, "--only", "e90.1")
    assert [found[name]["e90.1 status"] for name in ("ann", "bob", "cy")] == [
        "pass", "crashed", "pass",
    ]  # fmt: skip
    assert found["bob"]["e90.1 max"] == "3"


def test_names_that_a_spreadsheet_would_run(at: Terminal, tmp_path: Path) -> None:
    folder = submissions(tmp_path / "class", **{"=1+1": SOLUTION})
    assert [*grades(at, folder)] == ["'=1+1"]


@pytest.mark.parametrize(("words", "says"), [
    (("grade", "nowhere"), "There is no folder"), (("grade", "empty"), "holds no folders"),
    (("grade", "class", "--hidden", "empty"), "holds no hidden checks"),
    (("grade", "class", "--hidden", "odd"), "test_e99_1.py is of no exercise"),
    (("grade", "class", "--only", "e9.9"), "There is no exercise"),
    (("release", "--out", "class"), "is not empty"),
])  # fmt: skip
def test_mistakes_of_an_instructor(at, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "test_e99_1.py").write_text(CHECKS)
    submissions(tmp_path / "class", ann=SOLUTION)
    assert at.type(*words)[0] == 2
    assert says in capsys.readouterr().err


def test_release_has_no_solutions(at: Terminal, tmp_path: Path) -> None:
    out = tmp_path / "learners"
    code, shown = at.type("release", "--out", str(out))
    assert code == 0
    assert "without solutions" in shown
    names = {path.name for path in out.rglob("*")}
    assert {"exercises.toml", "test_e00_1.py", "e00_1.py", "minillm_exercises"} <= names
    assert not names & {"_solutions", "solution.py", "mutants", "__pycache__"}
