"""The interpreted tests, in processes of their own: few, for each imports torch and Triton anew.

To run one by hand: ``TRITON_INTERPRET=1 python -m pytest tests/kernels/interpreted/test_NAME.py``
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((Path(__file__).parent / "interpreted").glob("test_*.py"))
PROCESSES = 3  # so that the workers of a test run share them


@pytest.mark.parametrize("first", range(PROCESSES))
def test_interpreted(first: int) -> None:
    run(FILES[first::PROCESSES], "not slow")


@pytest.mark.slow
def test_interpreted_slow_ones() -> None:
    run(FILES, "slow")


def run(files: Sequence[Path], marked: str) -> None:
    """Run the tests of these files in a process of their own; all must pass."""
    assert files
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:nbval"]
    command += ["-m", marked, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE), done.stdout
