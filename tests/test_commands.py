"""The commands that run tests: together they run every test, in parts that do not overlap, and
`make test` can keep a budget."""

import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import chain, combinations
from pathlib import Path

import pytest

from tests import budget
from tests.parts import Part, part_of

ROOT = Path(__file__).resolve().parents[1]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
RECIPES = dict(re.findall(r"^([a-z-]+):[^\n]*\n((?:\t[^\n]*\n)+)", MAKEFILE, re.MULTILINE))
MATRIX = re.search(r"\n +make:\n((?: +- .+\n)+)", (ROOT / ".github/workflows/ci.yml").read_text())
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
MARKERS = [text.split(":")[0] for text in SETTINGS["tool"]["pytest"]["ini_options"]["markers"]]


def selected(calls: str, target: str, markers: tuple[str, ...]) -> bool:
    """Whether a target's $(TESTS), or $(INTERPRETED), runs a test with exactly these markers."""
    call = re.compile(rf'^\t\$\({calls}\)(?: -m (?:"(.+?)"|(\w+)))?', re.MULTILINE)
    found = call.findall(RECIPES[target])
    named = {marker: marker in markers for marker in MARKERS}
    return any(eval(one or other or "True", {}, named) for one, other in found)


@pytest.mark.parametrize(
    "markers", chain.from_iterable(combinations(MARKERS, n) for n in range(len(MARKERS) + 1))
)
@pytest.mark.parametrize("calls", ["TESTS", "INTERPRETED"])
def test_a_test_with_any_markers_is_run(calls: str, markers: tuple[str, ...]) -> None:
    assert selected(calls, "test-full", markers)
    assert MATRIX
    often = {line.split()[1] for line in MATRIX[1].splitlines()}
    assert any(selected(calls, target, markers) for target in often), "in no job of ci.yml"
    assert selected(calls, "test", markers) == (not markers), "make test runs what has no marker"


def test_the_workflow_has_every_part() -> None:
    assert MATRIX
    parts = re.findall(r"test-slow PART=(\d+)/(\d+)", MATRIX[1])
    assert parts == [(str(part), str(len(parts))) for part in range(1, len(parts) + 1)]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_commits_share_everything_that_is_slow(tmp_path: Path) -> None:
    """Run with a `make` that says what it is to make, once for each of the jobs."""
    (tmp_path / "make").write_text('#!/bin/sh\necho "make: $*"\n')
    (tmp_path / "make").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment.pop("JOB", None)

    def made(**job: str) -> list[str]:
        said = subprocess.run(
            [ROOT / ".ci/run"], env=environment | job, capture_output=True, text=True, check=True
        ).stdout
        return re.findall(r"^make: (.*)", said, re.MULTILINE)

    usual = made()
    assert made() == usual
    number = 20
    runs = [made(JOB=str(job)) for job in range(number)]
    assert usual in runs
    assert made(JOB=str(number)) == runs[0]
    assert all(run[:2] == ["test", "test-mutation"] and len(run) == 3 for run in runs)
    jobs = Counter(run[2] for run in runs)
    parts = {job for job in jobs if job.startswith("test-slow")}
    assert parts == {f"test-slow PART={part}/{len(parts)}" for part in range(1, len(parts) + 1)}
    assert {job.split()[0] for job in jobs} == {
        "test-slow", "facts", "facts-without-c", "notebooks"
    }  # fmt: skip


def test_every_test_is_in_one_part_and_parts_are_alike() -> None:
    sizes = Counter(part_of(f"tests/test_a.py::test_{number}", 8) for number in range(8000))
    assert sorted(sizes) == list(range(1, 9))
    assert max(sizes.values()) < 1.2 * min(sizes.values())
    for wrong in ("0/3", "4/3", "1", "1/0", "a/b"):
        with pytest.raises(pytest.UsageError, match="it must be K/N"):
            Part(wrong)


# ---- the budget ---------------------------------------------------------------------------------


def test_every_folder_has_a_budget() -> None:
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert set(map(budget.folder_of, files)) <= set(budget.FOLDERS)


def test_who_needs_too_much_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "FOLDERS", {"ops": 10.0, "tests": 1.0})
    monkeypatch.setattr(budget, "LONGEST", 2.0)
    monkeypatch.setattr(budget, "LONGER", {"tests/ops/test_b.py": 3.5})
    within = {"tests/ops/test_a.py::test_a": 3.9, "tests/ops/test_b.py::test_b": 6.0}
    within |= {"tests/test_c.py::test_c": 1.0}
    assert budget.faults(within, within, 1.0) == []
    (found,) = budget.faults(within | {"tests/ops/test_d.py::test_d": 0.2}, within, 1.0)
    assert found.startswith("ops: 10 CPU seconds, 10 allowed by FOLDERS in tests/budget.py.")
    assert found.splitlines()[1].split() == ["6.0", "s", "tests/ops/test_b.py::test_b"]
    (found,) = budget.faults(within, within | {"tests/ops/test_a.py::test_a": 4.1}, 1.0)
    assert found.startswith("tests/ops/test_a.py::test_a: 4.1 CPU seconds; above 2 it must be slow")
    twice = {test: 2 * seconds for test, seconds in within.items()}
    assert budget.faults(twice, twice, 2.0) == []
    assert len(budget.faults(twice, twice, 1.0)) == 4  # two folders and two tests
    assert "new: 1 CPU seconds, 0 allowed" in budget.faults({"tests/new/t.py::t": 1}, {}, 1.0)[0]


def test_interpreted_kernels_have_a_budget_of_their_own() -> None:
    assert budget.folder_of("tests/kernels/interpreted/test_a.py::test[a/b]") == "interpreted"
    assert budget.folder_of("tests/kernels/test_a.py::test_a") == "kernels"
    assert budget.folder_of("tests/quantization/gguf/test_a.py::test_a") == "quantization"
    assert budget.folder_of("tests/test_a.py::test_a") == "tests"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_seconds_of_children_count_while_they_live_and_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    monkeypatch.setattr("builtins.open", None)  # what other tests replace, too
    monkeypatch.setattr("pathlib.Path.read_text", None)
    before = budget.cpu_seconds()
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout
    assert child.stdout.readline() == "done\n"
    assert budget.cpu_seconds() - before >= 0.25
    child.communicate("\n")
    assert 0.25 <= budget.cpu_seconds() - before < 1.0
