"""The checks under pytest: ``pytest exercises/e03_kv_cache/test_e03_1.py [--impl PATH]``.

For debugging with pytest's own tools (``--pdb``, ``-x``, ``-vv``). The same checks run, but in this
process: no limits, and what the file does it does here. `python -m minillm_exercises` is safer.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from minillm_exercises.checking import CheckFailedError, run_traced
from minillm_exercises.guard import inspect_source
from minillm_exercises.manifest import Exercise, load_manifest
from minillm_exercises.workspace import Workspace, work_root


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--impl``."""
    parser.addoption("--impl", type=Path, help="the file to check (default: yours, in work/)")


def _exercise_of(path: Path) -> Exercise:
    for exercise in load_manifest(path.parent.parent).values():
        if exercise.checks == path:
            return exercise
    raise pytest.UsageError(f"{path.name} belongs to no exercise of exercises.toml.")


@pytest.fixture(scope="module")
def impl(request: pytest.FixtureRequest) -> ModuleType:
    """The module under test."""
    exercise = _exercise_of(request.path)
    yours = Workspace(work_root()).file(exercise)
    file: Path = request.config.getoption("--impl") or yours
    if not file.is_file():
        pytest.fail(
            f"{file} does not exist: run `python -m minillm_exercises start {exercise.id}`, or "
            f"name a file with --impl.",
            pytrace=False,
        )
    if finding := inspect_source(file.read_bytes(), exercise):
        pytest.fail(finding.message, pytrace=False)
    spec = importlib.util.spec_from_file_location(f"impl_{exercise.stem}", file)
    if spec is None or spec.loader is None:
        raise pytest.UsageError(f"{file} is no Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a check as the grader does: one that compares nothing fails."""
    if not hasattr(pyfuncitem.obj, "check_info"):
        return None
    failure = ""
    try:
        if not run_traced(pyfuncitem.obj, pyfuncitem.funcargs["impl"]).seen:
            failure = "This check compared nothing, so it cannot pass."
    except CheckFailedError as error:
        failure = str(error)
    if failure:
        pytest.fail(failure, pytrace=False)
    return True
