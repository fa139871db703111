"""Checkpoints that are damaged, incomplete or of another kind: one sentence naming the culprit."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from minillm.errors import (
    CheckpointError,
    ConfigError,
    MinillmError,
    ModelNotFoundError,
    UnsupportedFeatureError,
)
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from tests.models.parity import TOLERANCE, reference_logits, relative_error, whole
from tests.models.tiny import BASE, Tiny, prompt

INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
PYTHON_BASES = {
    CheckpointError: ValueError,
    ConfigError: ValueError,
    UnsupportedFeatureError: ValueError,
    ModelNotFoundError: FileNotFoundError,
}


def load(folder: Path | str) -> torch.nn.Module:
    return load_model(open_model(folder), torch.float32)


def refused(model: Path | str, kind: type[MinillmError], *culprits: str) -> None:
    """Loading fails with this class, which is also its Python base, in one short sentence."""
    with pytest.raises(kind) as caught:
        load(model)
    assert type(caught.value) is kind
    assert isinstance(caught.value, PYTHON_BASES[kind])
    message = str(caught.value)
    for culprit in culprits:
        assert culprit in message, message
    assert "\n" not in message
    assert message.endswith((".", "?"))


@pytest.fixture
def shards(checkpoint_of, tmp_path) -> Path:
    """A copy of a checkpoint in several files with an index."""
    target = tmp_path / "model"
    shutil.copytree(checkpoint_of("llama").folder, target)
    return target


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_header(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change the JSON header of a safetensors file and leave its data."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    edit(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])


# Tensors


def test_missing_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(Q_PROJ))
    refused(folder, CheckpointError, Q_PROJ)


def test_missing_output_matrix(folder):
    edit_json(folder / "config.json", tie_word_embeddings=False)
    refused(folder, CheckpointError, "lm_head.weight")


def test_extra_tensor(folder):
    edit_tensors(folder, lambda tensors: tensors.update({"model.extra.weight": torch.zeros(2)}))
    refused(folder, CheckpointError, "model.extra.weight", "[2]")


def test_extra_layer(folder):
    edit_json(folder / "config.json", num_hidden_layers=2)
    refused(folder, CheckpointError, "model.layers.2.")


def test_bias_that_the_config_does_not_announce(checkpoint_of, tmp_path):
    shutil.copytree(checkpoint_of("llama, biases").folder, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", mlp_bias=False)
    refused(tmp_path / "model", CheckpointError, "_proj.bias")


def test_shape_mismatch(folder):
    edit_json(folder / "config.json", intermediate_size=95)
    refused(folder, CheckpointError, "mlp.", "96", "95")


def test_sizes_beyond_any_memory_are_compared_first(folder):
    edit_json(folder / "config.json", hidden_size=1 << 24, intermediate_size=1 << 24)
    refused(folder, CheckpointError, "has shape", "16777216")


def test_transposed_square_is_not_seen_but_a_flat_one_is(folder):
    edit_tensors(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].flatten()}))
    refused(folder, CheckpointError, Q_PROJ, "[4096]", "[64, 64]")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.float64, torch.float8_e4m3fn])
def test_dtype_that_is_no_plain_weight(folder, dtype):
    edit_tensors(folder, lambda tensors: tensors.update({NORM: tensors[NORM].to(dtype)}))
    refused(folder, CheckpointError, NORM, str(dtype).removeprefix("torch."))


def test_tied_output_that_is_the_same_is_accepted(folder, checkpoint_of):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(folder, add)
    ids = prompt(7)
    reference = reference_logits(checkpoint_of("llama, tied"), ids)
    assert relative_error(whole(load(folder), ids), reference) <= TOLERANCE


@pytest.mark.parametrize("shape", [(128, 64), (127, 64)])
def test_tied_output_that_differs(folder, shape):
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": torch.ones(shape)}))
    refused(folder, CheckpointError, "lm_head.weight")


def test_stored_buffers_of_rope_are_skipped(folder):
    places = ("model.", *(f"model.layers.{i}.self_attn." for i in range(3)))
    ends = ("inv_freq", "cos_cached", "sin_cached")
    names = [f"{place}rotary_emb.{end}" for place in places for end in ends]
    expected = whole(load(folder), prompt(7))
    edit_tensors(folder, lambda t: t.update({name: torch.ones(8) for name in names}))
    assert torch.equal(whole(load(folder), prompt(7)), expected)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.inv_freq": torch.ones(8)}))
    refused(folder, CheckpointError, "model.layers.0.inv_freq")


def test_layers_of_multi_token_prediction_are_skipped(checkpoint_of, tmp_path):
    tiny = Tiny("deepseek_v3", {"num_mtp_layers": 1})
    folder = tmp_path / "model"
    checkpoint = checkpoint_of(tiny)
    shutil.copytree(checkpoint.folder, folder)
    assert open_model(folder).ignored_layers == 1
    extra = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    ids = prompt(7)
    assert relative_error(whole(load(folder), ids), reference_logits(checkpoint, ids)) <= TOLERANCE
    edit_tensors(folder, lambda tensors: tensors.update({"model.layers.4.x": torch.ones(1)}))
    refused(folder, CheckpointError, "model.layers.4.x")


def test_number_of_extra_layers_that_is_none(folder):
    edit_json(folder / "config.json", num_nextn_predict_layers="x")
    refused(folder, ConfigError, "num_nextn_predict_layers")


# Files


@given(cut=st.floats(0, 1, exclude_max=True))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_truncated_anywhere(checkpoint_of, tmp_path, cut):
    source = checkpoint_of("llama, tied").folder
    raw = (source / "model.safetensors").read_bytes()
    shutil.copy(source / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw[: int(cut * len(raw))])
    refused(tmp_path, CheckpointError, "model.safetensors")


@given(data=st.data())
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_header(checkpoint_of, tmp_path, data):
    """Any wrong byte in the header is an error of ours or leaves a header that means the same."""
    source = checkpoint_of("llama, tied").folder
    raw = bytearray((source / "model.safetensors").read_bytes())
    (size,) = struct.unpack("<Q", raw[:8])
    raw[data.draw(st.integers(0, 7 + size))] = data.draw(st.integers(0, 255))
    shutil.copy(source / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw)
    try:
        load(tmp_path)
    except MinillmError as error:
        assert isinstance(error, CheckpointError)  # noqa: PT017


@pytest.mark.parametrize(
    "change",
    [{"dtype": "F31"}, {"shape": [2**40, 2**40]}, {"shape": [-1]}, {"data_offsets": [8, 0]}],
)
def test_header_that_lies(folder, change):
    edit_header(folder / "model.safetensors", lambda header: header[NORM].update(change))
    refused(folder, CheckpointError, "model.safetensors")


def test_empty_file(folder):
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, CheckpointError, "model.safetensors")


def test_git_lfs_pointer(folder):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    (folder / "model.safetensors").write_text(pointer)
    refused(folder, CheckpointError, "model.safetensors")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, ModelNotFoundError, "safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_only(folder, name):
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"\x80\x04")
    refused(folder, ModelNotFoundError, "safetensors", "pickle")


def test_missing_shard(shards):
    next(shards.glob("model-00002-of-*.safetensors")).unlink()
    refused(shards, ModelNotFoundError, "model-00002-of-", INDEX)


def test_shards_without_index(shards):
    (shards / INDEX).unlink()
    refused(shards, CheckpointError, INDEX)


def test_model_safetensors_goes_before_other_formats_beside_it(folder):
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load(folder)


def test_tensor_in_two_shards(shards):
    files = sorted(shards.glob("*.safetensors"))
    first = load_file(files[0])
    save_file(load_file(files[1]) | first, files[1])
    refused(shards, CheckpointError, next(iter(sorted(first))), files[0].name, files[1].name)


@pytest.mark.parametrize("name", ["../other.safetensors", "sub/x.safetensors", "..", "", 3, None])
def test_index_that_leads_elsewhere(shards, name):
    edit_json(shards / INDEX, weight_map={NORM: name})
    with pytest.raises((CheckpointError, ModelNotFoundError), match=r"index\.json"):
        load(shards)


@pytest.mark.parametrize("weight_map", [None, [], "x", {}])
def test_index_without_a_map(shards, weight_map):
    edit_json(shards / INDEX, weight_map=weight_map)
    with pytest.raises((CheckpointError, ModelNotFoundError)):
        load(shards)


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", "[" * 100_000, "\xff\xfe"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_bad_json(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    refused(folder, CheckpointError, name)


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, ModelNotFoundError, "config.json")


def test_unknown_family(folder):
    edit_json(folder / "config.json", model_type="lama")
    refused(folder, ConfigError, "'lama'", "Did you mean 'llama'?")


def test_missing_field(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, ConfigError, "hidden_size")


@pytest.mark.parametrize("method", ["hqq", "aqlm"])
def test_an_unknown_quantisation(folder, method):
    edit_json(folder / "config.json", quantization_config={"quant_method": method})
    refused(folder, UnsupportedFeatureError, method)


# Names


def test_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", ModelNotFoundError, "nowhere")


def test_file_instead_of_folder(folder):
    refused(folder / "model.safetensors", ModelNotFoundError, "is a file")


def test_missing_gguf_file(tmp_path):
    refused(tmp_path / "model.gguf", ModelNotFoundError, "model.gguf")


def test_misspelt_embedded_name():
    refused("tinny", ModelNotFoundError, "tinny", "Did you mean 'tiny'?")


def test_hub_id_offline(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused("some-org/some-model", ModelNotFoundError, "some-org/some-model", "online")


def test_hub_failure_of_any_kind(monkeypatch):
    class ProxyError(Exception):
        """As HTTP clients have them: neither OSError nor of the hub's own classes."""

    def fail(*args: Any, **options: Any) -> None:
        raise ProxyError("no way out")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refused("some-org/some-model", ModelNotFoundError, "some-org/some-model", "ProxyError")


def test_unknown_preset():
    refused("preset:qwen3-0.6c", ConfigError, "qwen3-0.6b")


def test_preset_without_dummy():
    refused("preset:qwen3-0.6b", ConfigError, "load_format='dummy'")


# Token ids


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6, 7]}, {"eos_token_id": 2}, (5, 6, 7)),
        ({"eos_token_id": 5}, {"eos_token_id": [2, 3]}, (5,)),
        ({}, {"eos_token_id": [2, 3]}, (2, 3)),
        (None, {"eos_token_id": 2}, (2,)),
        (None, {}, ()),
        ({"eos_token_id": None}, {"eos_token_id": None}, ()),
    ],
)
def test_end_of_sequence_ids(tmp_path, generation, config, expected):
    base = {key: value for key, value in BASE.items() if key != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | base | config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    source = open_model(tmp_path)
    assert source.eos_token_ids == expected


@pytest.mark.parametrize("ids", ["2", 2.0, True, -1, [2, "3"], {"id": 2}])
def test_end_of_sequence_id_of_another_type(folder, ids):
    edit_json(folder / "generation_config.json", eos_token_id=ids)
    refused(folder, CheckpointError, "end-of-sequence", repr(ids))


def test_dummy_weights_need_no_file(folder):
    (folder / "model.safetensors").unlink()
    model = load_model(open_model(folder), torch.float32, load_format="dummy")
    again = load_model(open_model(folder), torch.float32, load_format="dummy")
    assert torch.equal(whole(model, prompt(7)), whole(again, prompt(7)))
    assert whole(model, prompt(7)).isfinite().all()
