"""`close` gives the memory back at once: weights, cache and rows, also while the engine is held and
nobody looks for garbage."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from minillm import LLM, SamplingParams
from minillm.errors import EngineDeadError, InvalidRequestError
from tests.engine.small import make
from tests.models.tiny import Tiny

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [1, 2, 3]
MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"dtype": "bfloat16"},
    "plain torch": {"enforce_eager": True},
    "deterministic": {"deterministic": True},
    "overlap and swap": {"async_scheduling": True, "swap_space": 0.01},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With matrices that fit panels, so that all layers may be one call; without a tokenizer, which
    is a warning that pytest keeps."""
    return Tiny("llama", {"num_hidden_layers": 2}).write(tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def generates(llm: LLM) -> None:
    llm.generate([PROMPT], GREEDY, use_tqdm=False)


def is_in_the_middle(llm: LLM) -> None:
    llm.left = llm.stream(PROMPT, GREEDY)  # type: ignore[attr-defined]
    next(llm.left)  # type: ignore[attr-defined]


def refuses(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate([[]], GREEDY)


def died(llm: LLM) -> None:
    llm.engine.scheduler.commit = None  # type: ignore[assignment, method-assign]
    with pytest.raises(EngineDeadError):
        llm.generate([PROMPT], GREEDY, use_tqdm=False)


@pytest.mark.parametrize("what", [generates, is_in_the_middle, refuses, died])
@pytest.mark.parametrize("mode", MODES)
def test_memory_is_given_back_at_once(folder, uncollected, mode, what: Callable[[LLM], None]):
    llm = make(folder, **MODES[mode])
    runner = llm.engine.runner
    model = llm.engine.forward_pass.model
    held = [runner, runner.kv, runner.rows, runner.sampler, model, model.embedding.weight]
    memory = [weakref.ref(each) for each in held]
    memory += [weakref.ref(layer.mlp.down_proj.weight) for layer in model.layers]
    del runner, model, held
    what(llm)
    assert all(each() is not None for each in memory)
    llm.close()
    assert [each() for each in memory] == [None] * len(memory)
