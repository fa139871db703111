"""Settings that must hold before the first import of torch, tokenizers or huggingface_hub.

They are environment variables, not calls such as `torch.set_num_threads`: the pure-Python tests
then need not import torch, and subprocesses that tests start inherit them. One thread per worker,
because the workers already fill the cores and a second thread only makes them wait for each other.
"""

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.budget import Budget
from tests.parts import Part

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
os.environ.update(ENVIRONMENT)

# No deadline: a shared machine may stop for a second, and no test may depend on a clock. The same
# examples every time in continuous integration, new ones on a developer's machine.
settings.register_profile("minillm", deadline=None, derandomize="CI" in os.environ)
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


def pytest_collection_finish() -> None:
    """Exclude what the imports left from garbage collection. A full collection of torch's and
    transformers' objects takes 0.25 s, and each asynchronous engine and many tests make one."""
    gc.collect()
    gc.freeze()


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
    """The tiny model of bytes, which no test changes."""
    from tests.engine.small import write_model

    return write_model(tmp_path_factory.mktemp("byte-model"))
