"""What the tests of the server share."""

from pathlib import Path

import pytest

from tests.serving.http_small import write_chat_model


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of bytes with a chat template, which no test changes."""
    return write_chat_model(tmp_path_factory.mktemp("chat-model"))
