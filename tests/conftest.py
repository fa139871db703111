"""Settings that must hold before the first import of torch, tokenizers or huggingface_hub.

They are environment variables, not calls such as `torch.set_num_threads`: the pure-Python tests
then need not import torch, and subprocesses that tests start inherit them. One thread per worker,
because the workers already fill the cores and a second thread only makes them wait for each other.
"""

import gc
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

import tests.quick_nbformat  # noqa: F401
from tests.budget import Budget
from tests.parts import Part

gc.disable()  # until `pytest_collection_finish`: what imports make stays

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
os.environ.update(ENVIRONMENT)

# In the background a shell has Ctrl-C ignored, and what tests start and interrupt would go on.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No limit of time: a shared machine may stop for a minute, and no test may depend on a clock. The
# same examples every time in continuous integration, new ones on a developer's machine.
settings.register_profile(
    "minillm",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize="CI" in os.environ,
)
settings.load_profile("minillm")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("minillm")
    group.addoption("--budget", action="store_true", help="fail above the seconds of budget.py")
    group.addoption("--part", metavar="K/N", help="only the K-th of N parts of the tests, K from 1")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("budget"):
        config.pluginmanager.register(Budget())
    if config.getoption("part"):
        config.pluginmanager.register(Part(config.getoption("part")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An address differs between processes, and xdist needs the same names in all."""
    if named := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"A name that holds an address: {named[0]}. Give the test ids.")


def pytest_collection_finish() -> None:
    """Exclude what the imports left from garbage collection. A full collection of torch's and
    transformers' objects takes 0.25 s, and each asynchronous engine and many tests make one."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    """A test that leaves more threads behind changes what later tests of its worker see."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        found = torch.get_num_threads()
        torch.set_num_threads(1)
        pytest.fail(f"This test left {found} threads: restore torch.set_num_threads.")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers and 264 ids, each of which has text. Tests do not change it."""
    from tests.engine.small import write_model

    return write_model(tmp_path_factory.mktemp("byte-model"))


class Shown(NamedTuple):
    """Exit code of a command, and what it printed."""

    code: int
    out: str
    err: str

    def refused(self, message: str) -> bool:
        """Whether it refused in one sentence, which has `message`, and printed nothing else."""
        lines = [line for line in self.err.splitlines() if not line.startswith("Try 'minillm")]
        one = len(lines) == 1 and lines[0].startswith("error: ")
        return (self.code, self.out) == (2, "") and one and message in lines[0]


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Shown]:
    """Call `main` as a program would be: ``cli("info", "tiny", stdin="...")``."""
    from minillm.cli import main

    monkeypatch.setenv("COLUMNS", "80")

    def call(*argv: object, stdin: str = "") -> Shown:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), "utf-8"))
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in argv])
        except SystemExit as leaving:  # argparse: help, version, a wrong option
            code = int(leaving.code or 0)
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return Shown(code, out, err)

    return call
