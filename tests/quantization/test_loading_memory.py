"""`quantization=`: matrices are quantised while files are read, one layer at a time."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from minillm import LLM
from minillm.errors import CheckpointError
from minillm.models import loader, quantize
from minillm.models.checkpoint import ModelSource, open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.models.quantize import quantize_weights, quantize_while_reading
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.quantized import Quantized
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.tiny import Checkpoint, Tiny
from tests.pairs import some
from tests.quantization.test_reader_matrix import tiny

BF16 = torch.bfloat16
FAMILIES = ("llama", "qwen2", "mixtral", "deepseek_v3")
LAYERS = 8


def load_at_once(source: ModelSource, how: str) -> Decoder:
    """All weights in 16 bits, and then quantised."""
    model = load_model(source, BF16)
    quantize_weights(model, how)
    return model


def load_while_reading(source: ModelSource, how: str) -> Decoder:
    """As an engine does."""
    model = load_model(source, BF16, shard=partial(quantize_while_reading, how=how))
    quantize_weights(model, how)
    return model


QUICK = {("llama", "tied", "int8"), ("qwen2", "plain", "int4"), ("mixtral", "plain", "int8"),
         ("deepseek_v3", "tied", "int4")}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "head", "how"), some(QUICK, product(FAMILIES, ("plain", "tied"), ("int8", "int4")))
)
def test_the_model_is_that_of_quantising_afterwards(checkpoint_of, monkeypatch, family, head, how):  # noqa: F811
    source = open_model(checkpoint_of(tiny(family, head)).folder)
    due = load_at_once(source, how)
    monkeypatch.setattr(quantize, "PIECE", 192)  # some rows at a time
    found = load_while_reading(source, how)
    theirs, ours = due.state_dict(), found.state_dict()
    assert theirs.keys() == ours.keys()
    assert [name for name in theirs if not torch.equal(theirs[name], ours[name])] == []
    assert {type(each.method) for each in found.modules() if hasattr(each, "method")} == {
        type(each.method) for each in due.modules() if hasattr(each, "method")
    }
    assert any(name.endswith("codes") for name in ours)


def living() -> list[torch.Tensor]:
    """The tensors of this process that have a storage, which those that oneDNN packed do not."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return [t for t in tensors if t.device.type == "cpu" and t.layout == torch.strided]


def live_bytes(before: set[int]) -> int:
    """Bytes of all tensors that did not exist before."""
    storages = {}
    for each in living():
        storage = each.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(size for place, size in storages.items() if place not in before)


def peak_of(load: Any, source: ModelSource, patch: pytest.MonkeyPatch) -> tuple[int, Decoder]:
    """The most bytes of tensors after any tensor of the files was stored, and the model."""
    gc.collect()
    before = {each.untyped_storage().data_ptr() for each in living()}
    peak, read = [0], loader.read_tensors

    def watched(*arguments: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read(*arguments):
            copy = tensor.clone()  # not a part of the mapped file
            del tensor
            yield name, copy
            peak[0] = max(peak[0], live_bytes(before))

    with patch.context() as inner:
        inner.setattr(loader, "read_tensors", watched)
        model = load(source)
    return peak[0], model


@pytest.mark.parametrize(
    ("family", "how"), some([("llama", "int8")], product(("llama", "mixtral"), ("int8", "int4")))
)
def test_the_peak_is_the_quantised_model_and_one_layer(checkpoint_of, monkeypatch, family, how):  # noqa: F811
    fields = {"num_hidden_layers": LAYERS, "intermediate_size": 96, "head_dim": 16}
    checkpoint: Checkpoint = checkpoint_of(Tiny(family, fields))
    source = open_model(checkpoint.folder)
    peak, model = peak_of(partial(load_while_reading, how=how), source, monkeypatch)
    plain = load_model(source, BF16)
    layer = max(sum(t.nbytes for t in each.parameters()) for each in plain.layers)
    most = sum(t.nbytes for t in model.state_dict().values()) + layer
    assert layer < peak <= 1.05 * most
    whole, _ = peak_of(partial(load_at_once, how=how), source, monkeypatch)
    assert whole > 1.3 * most  # the measure sees a 16-bit model


def test_a_matrix_is_rounded_some_rows_at_a_time(monkeypatch):
    sizes, rounding = [], quantize.ROUNDINGS["int8"]

    def watched(weight: torch.Tensor) -> Quantized:
        sizes.append(weight.numel())
        return rounding(weight)

    model = load_model(open_model("tiny"), BF16)
    matrix = model.layers[0].mlp.down_proj
    due = rounding(matrix.values())
    monkeypatch.setattr(quantize, "PIECE", 5000)
    quantize.round_matrix(matrix, watched, BF16)
    assert max(sizes) <= 5000
    assert sum(sizes) == due.shape[0] * due.shape[1]
    assert torch.equal(matrix.method.quantized(matrix).codes, due.codes)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_engine_quantises_either_way(monkeypatch, load_format):
    """Random weights are quantised when all are drawn."""
    seen, store = [], quantize.RoundedWhileReading._store
    monkeypatch.setattr(
        quantize.RoundedWhileReading, "_store", lambda *all: (seen.append(all), store(*all))[1]
    )
    llm = LLM("tiny", quantization="int8", load_format=load_format, enforce_eager=True)
    try:
        modules = list(llm.engine.runner.model.modules())
        methods = {type(each.method) for each in modules if hasattr(each, "method")}
        assert methods == {QuantizedMethod}
    finally:
        llm.close()
    assert bool(seen) == (load_format == "auto")


def test_a_tied_output_matrix_with_other_values_is_refused(checkpoint_of, tmp_path):  # noqa: F811
    from safetensors.torch import load_file, save_file

    folder = checkpoint_of(tiny("llama", "tied")).folder
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CheckpointError, match="two different tensors"):
        load_while_reading(open_model(tmp_path), "int8")
