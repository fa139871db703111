"""Every family from a GGUF file: the same tensors and logits as from its Hugging Face folder."""

import json

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from minillm.gguf import names
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from minillm.quantization.gguf import tensors
from tests.models.parity import whole
from tests.models.tiny import CASES, prompt
from tests.quantization.gguf.export import export

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


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1])
@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3", "deepseek_v3"])
def test_quantised_logits_are_those_of_the_dequantised_folder(name, kind, folders, tmp_path):
    """The same file, once in resident codes and once with its matrices decoded by `gguf`."""
    path = written(folders(name), tmp_path / "q.gguf", kind)
    reader, plain = gguf.GGUFReader(path), tmp_path / "plain.gguf"
    writer = gguf.GGUFWriter(plain, str(reader.fields["general.architecture"].contents()))
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for each in reader.tensors:
        writer.add_tensor(each.name, gguf.quants.dequantize(each.data, each.tensor_type))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert open_model(path).quantization
    ids = prompt(30)
    found, expected = whole(load(path), ids), whole(load(plain), ids)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_q_and_k_rows_keep_their_order_in_other_architectures(folders, tmp_path, monkeypatch):
    """A reader that undoes the order of "llama" for qwen3, or does not for llama, is found."""
    for name in ("llama", "qwen3"):
        folder = folders(name)
        path = written(folder, tmp_path / f"{name}.gguf")
        expected = whole(load(folder), prompt(20))
        assert torch.equal(whole(load(path), prompt(20)), expected)
    monkeypatch.setattr(tensors, "rotary_rows", lambda count, place, file: torch.arange(count))
    wrong = whole(load(tmp_path / "llama.gguf"), prompt(20))
    assert not torch.allclose(wrong, whole(load(folders("llama")), prompt(20)), rtol=0.1)


def test_the_transposed_keys_of_mla_are_found(folders, tmp_path):
    path = written(folders("deepseek_v3"), tmp_path / "m.gguf")
    file = tensors.open_gguf(path)
    place = names.places(file)["model.layers.0.self_attn.kv_b_proj.weight"]
    assert place.keys is not None
    assert place.keys.shape == (4, 32, 16)
