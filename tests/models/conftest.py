"""Tiny checkpoints, each built once per session."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from tests.models.tiny import CASES, ROPES, Checkpoint, Tiny

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Tiny | str], Checkpoint]:
    """The checkpoint of a `Tiny`, of a name in CASES, or of "family / name in ROPES"."""
    built: dict[str, Checkpoint] = {}

    def get(case: Tiny | str) -> Checkpoint:
        key = repr(case)
        if key not in built:
            if isinstance(case, str) and " / " in case:
                family, rope = case.split(" / ")
                case = ROPES[rope].tiny(family)
            tiny = CASES[case] if isinstance(case, str) else case
            built[key] = tiny.write(tmp_path_factory.mktemp("tiny"))
        return built[key]

    return get


@pytest.fixture
def folder(checkpoint_of, tmp_path) -> Path:
    """A copy of a whole tied checkpoint in one file, to be damaged."""
    target = tmp_path / "model"
    shutil.copytree(checkpoint_of("llama, tied").folder, target)
    return target
