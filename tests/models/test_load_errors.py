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
from minillm.models.decoder import Decoder
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


def refused(model: Path | str, kind: Any, *culprits: str) -> None:
    """Loading fails with this class (or one of these), which is also its Python base, in one short
    sentence."""
    with pytest.raises(kind) as caught:
        load(model)
    assert type(caught.value) in (kind if isinstance(kind, tuple) else (kind,))
    assert isinstance(caught.value, PYTHON_BASES[type(caught.value)])
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


def tensors(**changed: Any) -> Callable[[Path], None]:
    """Change tensors by name ("__" is a dot): a function of the old one, a tensor, or None."""

    def damage(folder: Path) -> None:
        def edit(stored: dict[str, torch.Tensor]) -> None:
            for key, made in changed.items():
                name = key.replace("__", ".")
                stored[name] = made(stored[name]) if callable(made) else made
                if stored[name] is None:
                    del stored[name]

        edit_tensors(folder, edit)

    return damage


def config(**changed: Any) -> Callable[[Path], None]:
    """Change fields of config.json."""
    return lambda folder: edit_json(folder / "config.json", **changed)


def content(name: str, data: bytes | None) -> Callable[[Path], Any]:
    """Write a file, or delete it (None)."""
    if data is None:
        return lambda folder: (folder / name).unlink()
    return lambda folder: (folder / name).write_bytes(data)


def no_field(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    del data["hidden_size"]
    (folder / "config.json").write_text(json.dumps(data))


def no_weights_but(name: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


Q, N, W = Q_PROJ.replace(".", "__"), NORM.replace(".", "__"), "model.safetensors"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
PLAIN: list[tuple[str, Callable[[Path], Any], type[MinillmError], tuple[str, ...]]] = [
    ("no tensor", tensors(**{Q: None}), CheckpointError, (Q_PROJ,)),
    ("no output matrix", config(tie_word_embeddings=False), CheckpointError, ("lm_head.weight",)),
    ("no two tensors", tensors(**{Q: None, N: None}), CheckpointError, (" and 1 more.",)),
    ("one more", tensors(model__x=torch.zeros(2)), CheckpointError, ("model.x", "[2]")),
    ("one more layer", config(num_hidden_layers=2), CheckpointError, ("model.layers.2.",)),
    ("shape", config(intermediate_size=95), CheckpointError, ("mlp.", "96", "95")),
    ("more than any memory", config(hidden_size=1 << 24, intermediate_size=1 << 24),
     CheckpointError, ("has shape", "16777216")),
    ("flat", tensors(**{Q: torch.Tensor.flatten}), CheckpointError, (Q_PROJ, "[4096]", "[64, 64]")),
    *((str(dtype), tensors(**{N: lambda old, dtype=dtype: old.to(dtype)}), CheckpointError,
       (NORM, str(dtype).removeprefix("torch.")))
      for dtype in (torch.int8, torch.int64, torch.float64, torch.float8_e4m3fn)),
    *((f"tied output of {rows}", tensors(lm_head__weight=torch.ones(rows, 64)), CheckpointError,
       ("lm_head.weight",)) for rows in (128, 127)),
    ("no number", config(num_nextn_predict_layers="x"), ConfigError, ("num_nextn_predict_layers",)),
    *((f"header: {change}",
       lambda folder, change=change: edit_header(folder / W, lambda h: h[NORM].update(change)),
       CheckpointError, (W,))
      for change in ({"dtype": "F31"}, {"shape": [2**40, 2**40]}, {"shape": [-1]},
                     {"data_offsets": [8, 0]})),
    ("empty file", content(W, b""), CheckpointError, (W,)),
    ("pointer of Git LFS", content(W, LFS), CheckpointError, (W,)),
    ("no weights", content(W, None), ModelNotFoundError, ("safetensors",)),
    *((name, no_weights_but(name), ModelNotFoundError, ("safetensors", "pickle"))
      for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt")),
    *((f"{name}: {text[:9]}", content(name, text.encode("latin-1")), CheckpointError, (name,))
      for name in ("config.json", "generation_config.json", INDEX)
      for text in ("", "{", "[1]", "null", "[" * 100_000, "\xff\xfe")),
    ("no config", content("config.json", None), ModelNotFoundError, ("config.json",)),
    ("family", config(model_type="lama"), ConfigError, ("'lama'", "Did you mean 'llama'?")),
    ("no field", no_field, ConfigError, ("hidden_size",)),
    *((method, config(quantization_config={"quant_method": method}), UnsupportedFeatureError,
       (method,)) for method in ("hqq", "aqlm")),
    *((f"end {ids!r}",
       lambda folder, ids=ids: edit_json(folder / "generation_config.json", eos_token_id=ids),
       CheckpointError, ("end-of-sequence", repr(ids)))
      for ids in ("2", 2.0, True, -1, [2, "3"], {"id": 2})),
]  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "kind", "culprits"), PLAIN, ids=[p[0] for p in PLAIN])
def test_damage_is_named(folder, name, damage, kind, culprits):
    damage(folder)
    refused(folder, kind, *culprits)


@pytest.mark.parametrize(
    ("damage", "kind", "culprits"),
    [
        (lambda folder: next(folder.glob("model-00002-of-*")).unlink(), ModelNotFoundError,
         ("model-00002-of-", INDEX)),
        (content(INDEX, None), CheckpointError, (INDEX,)),
        *((lambda folder, name=name: edit_json(folder / INDEX, weight_map={NORM: name}),
           kind, ("index.json",))
          for kind, names in ((CheckpointError, ("../other.safetensors", "sub/x.safetensors")),
                              (ModelNotFoundError, ("..", "", 3, None))) for name in names),
        *((lambda folder, found=found: edit_json(folder / INDEX, weight_map=found),
           (CheckpointError, ModelNotFoundError), ()) for found in (None, [], "x", {})),
    ],
)  # fmt: skip
def test_damage_of_shards_is_named(shards, damage, kind, culprits):
    damage(shards)
    refused(shards, kind, *culprits)


@pytest.mark.parametrize(
    ("name", "kind", "culprits"),
    [
        ("nowhere", ModelNotFoundError, ("nowhere",)),
        ("{folder}/model.safetensors", ModelNotFoundError, ("is a file",)),
        ("nowhere.gguf", ModelNotFoundError, ("nowhere.gguf",)),
        ("tinny", ModelNotFoundError, ("tinny", "Did you mean 'tiny'?")),
        ("preset:qwen3-0.6c", ConfigError, ("qwen3-0.6b",)),
        ("preset:qwen3-0.6b", ConfigError, ("load_format='dummy'",)),
    ],
)
def test_a_name_of_no_checkpoint_is_named(folder, name, kind, culprits):
    refused(name.format(folder=folder), kind, *culprits)


# Tensors


def test_bias_that_the_config_does_not_announce(checkpoint_of, tmp_path):
    shutil.copytree(checkpoint_of("llama, biases").folder, tmp_path / "model")
    edit_json(tmp_path / "model" / "config.json", mlp_bias=False)
    refused(tmp_path / "model", CheckpointError, "_proj.bias")


def test_tied_output_that_is_the_same_is_accepted(folder, checkpoint_of):
    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit_tensors(folder, add)
    ids = prompt(7)
    reference = reference_logits(checkpoint_of("llama, tied"), ids)
    assert relative_error(whole(load(folder), ids), reference) <= TOLERANCE


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


def test_model_safetensors_goes_before_other_formats_beside_it(folder):
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load(folder)


def test_tensor_in_two_shards(shards):
    files = sorted(shards.glob("*.safetensors"))
    first = load_file(files[0])
    save_file(load_file(files[1]) | first, files[1])
    refused(shards, CheckpointError, next(iter(sorted(first))), files[0].name, files[1].name)


# Names


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


def test_a_name_of_two_tensors(folder):
    """In one header, which safetensors reads without a word, and in two layers of a model."""
    file = folder / "model.safetensors"
    data = file.read_bytes()
    size = struct.unpack_from("<Q", data)[0]
    text = data[8 : 8 + size].decode().strip()
    entry = json.dumps({NORM: json.loads(text)[NORM]})[1:-1]
    text = f"{text[:-1]},{entry}}}"
    text += " " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + size :])
    refused(folder, CheckpointError, "model.safetensors", f"{NORM} twice")
    model = Decoder(open_model("tiny").config, device="meta")
    model.layers[1].mlp_norm.name = model.layers[0].mlp_norm.name
    with pytest.raises(RuntimeError, match=r"Two layers.*layers\.0\.post_attention"):
        model.checkpoint_tensors()
