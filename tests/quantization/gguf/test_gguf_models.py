"""Every family from a GGUF file: the same tensors and logits as from its Hugging Face folder."""

import json
from itertools import product

import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.gguf import names
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.quantization.gguf import tensors
from tests.models.parity import whole
from tests.models.tiny import CASES, prompt
from tests.pairs import some
from tests.quantization.gguf.export import copied, export

NAMES = [
    "llama", "llama, biases", "llama, multi-query", "mistral", "mixtral", "qwen2", "qwen3",
    "deepseek_v2", "deepseek_v2, groups", "deepseek_v3",
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp("gguf") / "model"
            CASES[name].write(made[name])
        return made[name]

    return folder


def written(folder, path, kind=Type.F32):
    return export(folder, json.loads((folder / "config.json").read_text()), path, kind)


def load(path):
    return load_model(open_model(path), torch.float32)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_the_folder(name, folders, tmp_path):
    folder = folders(name)
    own, theirs = load(written(folder, tmp_path / "m.gguf")), load(folder)
    expected = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    found = {**dict(own.named_parameters()), **dict(own.named_buffers())}
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
    ids = prompt(40)
    assert torch.equal(whole(own, ids), whole(theirs, ids))


FEW = ("llama", "mixtral", "qwen3", "deepseek_v3")
KINDS = (Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)


@pytest.mark.parametrize(
    ("name", "kind"),
    some([*zip(FEW, KINDS, strict=False), ("llama", KINDS[4])], product(FEW, KINDS)),
)
def test_quantised_logits_are_those_of_the_dequantised_folder(name, kind, folders, tmp_path):
    """The same file, once in resident codes and once with its matrices decoded by `gguf`."""
    path = written(folders(name), tmp_path / "q.gguf", kind)
    plain = copied(path, tmp_path / "plain.gguf")
    assert open_model(path).quantization
    ids = prompt(30)
    found, expected = whole(load(path), ids), whole(load(plain), ids)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.mutation
def test_q_and_k_rows_in_the_order_of_the_file_are_found(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "rotary_rows", lambda count, place, file: torch.arange(count))
    with pytest.raises(AssertionError):
        test_tensors_are_those_of_the_folder("llama", folders, tmp_path)


def test_the_transposed_keys_of_mla_are_found(folders, tmp_path):
    path = written(folders("deepseek_v3"), tmp_path / "m.gguf")
    file = tensors.open_gguf(path)
    place = names.places(file)["model.layers.0.self_attn.kv_b_proj.weight"]
    assert place.keys is not None
    assert place.keys.shape == (4, 32, 16)
