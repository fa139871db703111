"""Decode steps as recorded graphs with quantised weights, in the layouts of a GPU's kernels, on
reference operations without a GPU (`test_graphs.py`): no setting changes a token."""

from pathlib import Path
from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.layers.linear_methods import Matrix
from minillm.ops import dispatch
from minillm.ops.dispatch import Backend
from minillm.quantization.kernels import (
    KernelQuantizedMethod,
    StackedQuantizedMethod,
    pack_for_kernels,
)
from minillm.quantization.methods import QuantizedMethod
from tests.engine.small import assert_idle, limit_steps, make, tokens
from tests.execution.test_graphs import (
    SETTINGS,
    Again,
    Waits,
    begun,
    give_graphs,
    poison,
    run,
)
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.quantization.test_quantized_cells import folder_of
from tests.quantization.test_reader_matrix import tiny

FAMILIES = ("llama", "qwen3_moe", "deepseek_v3")
WEIGHTS = ("int8", "int4", "gptq, act order")
ROOM = {"num_gpu_blocks_override": 64}


@pytest.fixture
def engine(checkpoint_of, tmp_path, monkeypatch):  # noqa: F811
    """Makes engines of a family: eager ones, or in the layouts of the kernels."""

    def made(family: str, weights: str, in_layouts: bool, **settings: Any) -> LLM:
        folder, how = folder_of(checkpoint_of(tiny(family)), weights, place(tmp_path, weights))
        llm = make(folder, enforce_eager=True, **(ROOM | how | settings))
        if in_layouts:
            with monkeypatch.context() as patch:
                patch.setattr(dispatch, "backend_of", lambda device: Backend("triton", ""))
                assert pack_for_kernels(llm.engine.runner.model, torch.device("cpu")) > 0
        return llm

    return made


def place(folder: Path, weights: str) -> Path:
    """A new folder for each engine."""
    found = folder / f"{weights}-{len(list(folder.iterdir()))}"
    found.mkdir()
    return found


def methods(llm: LLM) -> set[type]:
    """How the matrices of the layers are stored."""
    layers = llm.engine.runner.model.layers
    return {type(each.method) for each in layers.modules() if isinstance(each, Matrix)}


def cells() -> list[Any]:
    """All combinations; `make test` runs each kind of weights once, and each family once."""
    quick = {("llama", "int8", "swap"), ("qwen3_moe", "int4", "chunks"),
             ("deepseek_v3", "gptq, act order", "few seats")}  # fmt: skip
    every = [(f, w, s) for f in FAMILIES for w in WEIGHTS for s in SETTINGS]
    return [pytest.param(*each, marks=() if each in quick else pytest.mark.slow) for each in every]


@pytest.mark.parametrize(("family", "weights", "setting"), cells())
def test_the_same_tokens_as_without(engine, monkeypatch, family, weights, setting):
    plain = engine(family, weights, False)
    assert QuantizedMethod in methods(plain)
    expected = list(map(tokens, run(plain)))
    llm = engine(family, weights, True, **SETTINGS[setting])
    limit_steps(llm, monkeypatch)
    assert KernelQuantizedMethod in methods(llm)
    assert (StackedQuantizedMethod in methods(llm)) == (family != "llama")
    again = give_graphs(llm)
    poison(llm)
    assert list(map(tokens, run(llm))) == expected
    assert_idle(llm.engine)
    replayed = [record for record in llm.trace if record.graph_rows]
    assert again.replays == len(replayed) > 10


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_decode_step_waits_for_nothing_before_its_tokens(engine, monkeypatch, weights, planted):
    """And a product that looks at its weights would be found."""
    llm = begun(engine("llama", weights, True))
    plan, runner = llm.engine.scheduler.schedule(), llm.engine.runner
    apply = KernelQuantizedMethod.apply

    def looks(self: Any, matrix: Matrix, *rest: Any) -> torch.Tensor:
        matrix.get_buffer("scales").max().item()
        return apply(self, matrix, *rest)

    with monkeypatch.context() as patch:
        if planted:
            patch.setattr(KernelQuantizedMethod, "apply", looks)
        waits = Waits(patch, llm)
        flight = runner.launch(plan)
    assert flight.result.graph_rows == 4
    assert set(waits.seen) == ({"item"} if planted else set())
    llm.engine.scheduler.commit(plan, flight.collect().token_ids)


def test_other_weights_are_seen(engine):
    """The tokens are those of these weights: a graph that kept others would differ."""
    first, second = (list(map(tokens, run(engine("llama", how, True)))) for how in WEIGHTS[:2])
    assert first != second
    llm = engine("llama", "int8", True)
    give_graphs(llm, Again())
    with torch.inference_mode():
        llm.engine.runner.model.layers[0].mlp.down_proj.get_buffer("scales").mul_(-1)
    assert list(map(tokens, run(llm))) != first
