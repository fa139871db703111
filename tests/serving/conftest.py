"""What the tests of the server share."""

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minillm import LLM, AsyncLLMEngine
from minillm.cli import main, serve
from minillm.serving.settings import Settings
from tests.engine.small import make
from tests.serving.async_small import make_async, run
from tests.serving.http_small import Served, served, write_chat_model


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in an event loop of its own, and leaves no task in it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of bytes with a chat template, which no test changes."""
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="session")
def llm(folder: Path) -> Iterator[LLM]:
    """`LLM` of the tiny model, whose answers streams and replies must have."""
    with make(folder, num_gpu_blocks_override=128) as made:
        yield made


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """A server of the tiny model, with the `SETTINGS` and the `ARGUMENTS` of the engine that a file
    of tests has."""
    settings, arguments = (getattr(request.module, n, {}) for n in ("SETTINGS", "ARGUMENTS"))
    with served(folder, settings, **arguments) as made:
        yield made


@pytest.fixture
def settings_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Settings]:
    """What `minillm serve` makes of its options, without a model."""
    seen: list[Settings] = []
    launch = SimpleNamespace(
        load=lambda arguments, quiet: SimpleNamespace(shutdown=lambda: None),
        memory_line=lambda engine: "",
        serve=lambda engine, settings, listener, say: seen.append(settings) or 0,
    )
    monkeypatch.setattr(serve, "import_server", lambda: launch)

    def made(*options: str) -> Settings:
        assert main(["serve", "tiny", "--port", "0", *options]) == 0
        return seen.pop()

    return made


@pytest.fixture
def engine_of(folder: Path) -> Iterator[Callable[..., AsyncLLMEngine]]:
    """Make engines of the tiny model, whose threads end with the test."""
    engines = []

    def make(**arguments: Any) -> AsyncLLMEngine:
        engines.append(make_async(folder, **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.shutdown()
        assert not engine._steps._thread.is_alive()


@pytest.fixture
def engine(engine_of: Callable[..., AsyncLLMEngine]) -> AsyncLLMEngine:
    """An engine of the tiny model."""
    return engine_of()
