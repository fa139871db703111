"""What the tests of the server share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import AsyncLLMEngine
from tests.serving.async_small import make_async
from tests.serving.http_small import write_chat_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of bytes with a chat template, which no test changes."""
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))


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
