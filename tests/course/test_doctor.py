"""`doctor` on machines that lack something: each problem is said with what to do about it."""

import tomllib
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from minillm_exercises import doctor
from minillm_exercises.doctor import Finding, examine, packages, torch_works, triton_works, writable
from tests.course.small import Terminal, terminal

ROOT = Path(__file__).resolve().parents[2]
FACTS = '{"version": "2.13.0", "right": %s, "threads": 1, "cuda": false, "device": "cpu"}'


@pytest.fixture
def at(tmp_path: Path) -> Terminal:
    return terminal(tmp_path)


def says(out: str = "", code: int = 0, error: str = "") -> Any:
    """A process that ends like this."""
    return lambda *_, **__: SimpleNamespace(stdout=out, stderr=error, returncode=code)


@pytest.mark.slow
def test_this_machine(at: Terminal) -> None:
    """The real thing: torch and interpreted Triton in processes of their own."""
    found = {finding.about: finding for finding in examine(at.session)}
    assert found["torch"].level == "ok", found["torch"]
    assert found["python"].level == "ok"
    assert found["packages"].level != "problem", found["packages"]
    assert found["triton"].level in ("ok", "note"), found["triton"]
    assert found["exercises"].said == "2 of 3 can be done here"
    assert found["e91.1"].said == "not here: needs no_such_package"


@pytest.mark.parametrize(("run", "part"), [
    (says("0.25\n"), "wrong values (off by 0.25)"), (says("nan\n"), "wrong values (off by nan)"),
    (says("1.1e-6\n"), "wrong values"),
    (says(code=1, error="Traceback\nAttributeError: newer numpy"), "AttributeError"),
    (says(code=-11), "the process ended with code -11"), (says(""), "the interpreter fails"),
])  # fmt: skip
def test_a_triton_that_does_not_work(run: Any, part: str) -> None:
    pytest.importorskip("triton")
    found = triton_works(run)
    assert found.level == "problem"
    assert part in found.said
    assert found.remedy


def test_no_triton_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert triton_works().level == "note"


def test_torch() -> None:
    def levels(run: Any) -> list[str]:
        return [f"{f.about} {f.level}" for f in torch_works(run)]

    assert levels(says("a warning\n" + FACTS % "true")) == ["torch ok", "threads ok"]
    assert levels(says(FACTS % "false"))[0] == "torch problem"
    assert levels(says(code=1, error="ImportError: libc")) == ["torch problem"]
    many = FACTS.replace('"threads": 1', '"threads": 999') % "true"
    threads = [*torch_works(says(many))][1]
    assert threads.level == "note"
    assert "OMP_NUM_THREADS=" in threads.remedy


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "COURSE", ("torch", "rich"))
    pins = tmp_path / "constraints.txt"
    pins.write_text("#torch==1\ntorch==2.13.0  # why\nRich==15.0.0\n")
    have = {"torch": "2.13.0+cpu", "rich": "15.0.0"}

    def version(name: str) -> str:
        if name not in have:
            raise PackageNotFoundError(name)
        return have[name]

    assert [f.level for f in packages(pins, version)] == ["ok"]
    have["rich"] = "14.0"
    (found,) = packages(pins, version)
    assert (found.level, found.said) == ("note", "other versions: rich 14.0 (tested: 15.0.0)")
    del have["torch"]
    assert [f.level for f in packages(pins, version)] == ["problem", "note"]
    have["torch"] = "1"
    (found,) = packages(tmp_path / "none.txt", version)
    assert "no constraints.txt" in found.said


def test_the_remedy_installs_what_the_course_needs() -> None:
    """By pyproject.toml: the extra that INSTALL names, with the extras that it names itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *extras["course"], *extras["serve"], *extras["structured"]]
    assert ".[course]" in doctor.INSTALL
    assert set(doctor.COURSE) <= {Requirement(line).name for line in lines}


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "work"
    blocked.write_text("")
    assert writable(blocked).level == "problem"
    assert "MINILLM_WORK" in writable(blocked).remedy
    assert writable(tmp_path / "new").level == "ok"
    assert [*(tmp_path / "new").iterdir()] == []


def test_the_exit_code(at: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    fine = Finding("ok", "python", "3.12")
    note = Finding("note", "triton", "not installed", "use Linux")
    bad = Finding("problem", "torch", "does not load", "install it")
    for found, code, last in (
        ([fine, note], 0, "All is well."),
        ([fine, bad], 1, "1 problem."),
        ([bad, bad], 1, "2 problems."),
    ):
        monkeypatch.setattr("minillm_exercises.cli.learn.examine", lambda _, f=found: f)
        got, shown = at.type("doctor")
        assert got == code
        assert shown.splitlines()[-1] == last
    assert "✗ problem  torch      does not load\n             install it" in shown
