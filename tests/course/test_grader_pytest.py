"""The pytest bridge, exercises/conftest.py: the same checks, for those who want --pdb."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ToyRoot

BRIDGE = Path(__file__).resolve().parents[2] / "exercises" / "conftest.py"


@pytest.fixture
def bridged(toy_root: ToyRoot) -> ToyRoot:
    """The toys with the bridge beside them, as in exercises/."""
    shutil.copy(BRIDGE, toy_root.root)
    return toy_root


def run(root: ToyRoot, *arguments: str) -> tuple[int, str]:
    """pytest on the checks of e90.1."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header"]
    checks = root.root / "e90_windows/test_e90_1.py"
    done = subprocess.run(
        [*command, str(checks), *arguments],
        cwd=root.root,
        env={
            **os.environ,
            "MINILLM_WORK": str(root.root / "work"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # a third of the time
        },
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_mistake_is_told_in_the_checks_words(bridged: ToyRoot) -> None:
    bridged.write("wrong.py", bridged.manifest["e90.1"].mutants[1].source)  # starts_at_zero
    code, output = run(bridged, "--impl", "wrong.py")
    assert code == 1
    assert "expected [-5, -5, 2, 2], got [0, 0, 2, 2]." in output
    assert "2 passed" in output
    assert "Error" not in output


def test_the_learners_file_is_the_default(bridged: ToyRoot) -> None:
    code, output = run(bridged)
    assert code == 1
    assert "start e90.1`" in output
    solution = (bridged.root / "_solutions/e90_1/alternate.py").read_text("utf-8")
    bridged.write("work/e90_windows/e90_1.py", solution)
    code, output = run(bridged)
    assert code == 0
    assert "3 passed" in output
    bridged.write("work/e90_windows/e90_1.py", "import minillm\n" + solution)
    code, output = run(bridged)
    assert code == 1
    assert "build it yourself" in output


def test_a_check_that_compares_nothing_fails_here_too(bridged: ToyRoot) -> None:
    bridged.edit("e90_windows/test_e90_1.py", "    equal(impl", "    (lambda *a: a)(impl")
    code, output = run(bridged, "--impl", "_solutions/e90_1/solution.py")
    assert code == 1
    assert "compared nothing" in output
