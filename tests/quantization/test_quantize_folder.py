"""`quantize_folder`: files that our reader loads with the same values, resuming, and refusals."""

import json
import shutil
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from minillm.errors import ConfigError, UnsupportedFeatureError
from minillm.lab.quantise import quantize_folder as folders
from minillm.lab.quantise.quantize_folder import quantize_folder
from minillm.lab.quantise.quantize_layers import quantized_model
from minillm.lab.quantise.recipe import Recipe
from minillm.models.checkpoint import open_model, shard_files
from minillm.models.loader import load_model
from minillm.quantization.methods import QuantizedMethod
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.parity import whole
from tests.models.tiny import Tiny, prompt
from tests.pairs import some

F32 = torch.float32
WINDOWS = torch.randint(128, (6, 24), generator=torch.Generator().manual_seed(7))
FAMILIES = ("llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3", "olmo2")

QUICK = (
    *(("llama", method) for method in ("rtn", "awq", "smoothquant", "int8")),
    *((family, "gptq") for family in ("qwen2", "qwen3_moe", "deepseek_v3", "olmo2")),
)


logits = partial(whole, ids=prompt(20))  # [20, V]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder."""
    return {k: v for path in shard_files(folder) for k, v in load_file(path).items()}


def recipe(method: str, **settings) -> Recipe:
    """A recipe for matrices of 64, 96 and other small numbers of inputs."""
    if method in ("rtn", "gptq", "awq"):
        settings = {"group_size": 8} | settings
    return Recipe(method, **settings)


@pytest.mark.parametrize(
    ("family", "method"),
    some(QUICK, product(FAMILIES, ("rtn", "gptq", "awq", "smoothquant", "int8"))),
)
def test_the_written_folder_is_the_quantised_model(checkpoint_of, tmp_path, family, method):  # noqa: F811
    source = open_model(checkpoint_of(family).folder)
    report = quantize_folder(source, recipe(method), tmp_path / "out", WINDOWS)
    model = load_model(source, F32)
    before = logits(model)
    made = quantized_model(model, recipe(method), WINDOWS, torch.float16)
    due, found = logits(model), logits(load_model(open_model(tmp_path / "out"), F32))
    assert (found - due).abs().max() <= 2e-3 * due.abs().max()
    assert (found - before).abs().max() > 1e-3 * due.abs().max()  # it is quantised at all
    assert {each.name for each in made} == set(report.errors)
    assert report.num_bytes < report.source_bytes


WIDE = Tiny("llama", {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2})
LAYOUTS = (
    ("gptq", {"method": "gptq"}),
    ("gptq", {"method": "gptq", "bits": 8, "group_size": -1}),
    ("gptq", {"method": "gptq", "act_order": True, "group_size": 32}),
    ("gptq", {"method": "rtn", "symmetric": True}),
    ("awq", {"method": "awq", "group_size": 32}),
    ("compressed-tensors", {"method": "gptq", "act_order": True, "group_size": 32}),
    ("compressed-tensors", {"method": "gptq", "act_order": True, "static_groups": True}),
    ("compressed-tensors", {"method": "rtn", "symmetric": True}),
    ("compressed-tensors", {"method": "fp8", "group_size": -1}),
    ("fp8", {"method": "fp8"}),
    ("bnb", {"method": "nf4"}),
    ("bnb", {"method": "nf4", "double": False}),
    ("bnb", {"method": "int8"}),
)


@pytest.mark.parametrize(("format", "settings"), LAYOUTS)
def test_every_layout_is_read_back_exactly(checkpoint_of, tmp_path, format, settings):  # noqa: F811
    source = open_model(checkpoint_of(WIDE).folder)
    quantize_folder(source, Recipe(**settings), tmp_path / "out", WINDOWS, format)
    model = load_model(source, F32)
    grouped = settings["method"] in ("rtn", "gptq", "awq")
    quantized_model(model, Recipe(**settings), WINDOWS, torch.float16 if grouped or (
        format == "compressed-tensors") else F32)  # fmt: skip
    found = load_model(open_model(tmp_path / "out"), F32)
    for mine, theirs in zip(model.layers, found.layers, strict=True):
        for due, read in (
            (mine.mlp.down_proj, theirs.mlp.down_proj),
            (mine.attention.qkv_proj, theirs.attention.qkv_proj),
        ):
            assert isinstance(read.method, QuantizedMethod)
            assert (due.values() - read.values()).abs().max() <= 1e-6 * due.values().abs().max()
    if format == "compressed-tensors" and grouped:
        zeros = any("zero_point" in name for name in tensors(tmp_path / "out"))
        assert zeros != Recipe(**settings).symmetric


def stop_after(monkeypatch, layers: int) -> None:
    """Make a run fail when it writes another layer."""
    write = folders.Run.write_layer

    def limited(self, result):
        if result.index == layers:
            raise KeyboardInterrupt
        write(self, result)

    monkeypatch.setattr(folders.Run, "write_layer", limited)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_stopped_run_continues_to_the_same_files(checkpoint_of, tmp_path, monkeypatch, method):  # noqa: F811
    source = open_model(checkpoint_of("qwen3").folder)
    quantize_folder(source, recipe(method), tmp_path / "whole", WINDOWS)
    with monkeypatch.context() as patch:
        stop_after(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            quantize_folder(source, recipe(method), tmp_path / "out", WINDOWS)
    with pytest.raises(ConfigError, match="other settings"):
        quantize_folder(source, recipe(method, bits=8), tmp_path / "out", WINDOWS)
    with pytest.raises(ConfigError, match="other settings"):
        quantize_folder(source, recipe(method), tmp_path / "out", WINDOWS + 1)
    first = (tmp_path / "out" / "model-00001-of-00004.safetensors").stat().st_mtime_ns
    quantize_folder(source, recipe(method), tmp_path / "out", WINDOWS)
    assert (tmp_path / "out" / "model-00001-of-00004.safetensors").stat().st_mtime_ns == first
    due, found = tensors(tmp_path / "whole"), tensors(tmp_path / "out")
    assert due.keys() == found.keys()
    assert all(torch.equal(due[name], found[name]) for name in due)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in (tmp_path / "whole").iterdir()}
    assert "quantize.json" not in names


def test_the_folder_is_complete(tmp_path):
    """The embedded model, with a tokenizer and generation defaults."""
    report = quantize_folder(open_model("tiny"), Recipe("rtn"), tmp_path / "out")
    names = {path.name for path in report.folder.iterdir()}
    assert {"config.json", "tokenizer.json", "generation_config.json", "README.md"} <= names
    assert "down_proj" in (report.folder / "README.md").read_text()
    settings = json.loads((report.folder / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["weights"]["group_size"] == 128
    assert report.num_bytes < 0.4 * report.source_bytes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "gpt"}, "There is no method 'gpt'"),
        ({"bits": 9}, "9 bits are not possible"),
        ({"damp": -1.0}, "damp is -1.0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"method": "nf4", "group_size": 32}, "NF4 has blocks of 64"),
        ({"method": "fp8", "group_size": 64}, "FP8 has blocks of 128"),
        ({"method": "int8", "group_size": 64}, "a scale per row"),
    ],
)
def test_impossible_recipes(settings, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings)


@pytest.mark.parametrize(
    ("settings", "format", "message"),
    [
        ({"bits": 3}, None, "holds 4 or 8 bits, not 3"),
        ({"method": "nf4"}, "gptq", "cannot hold nf4"),
        ({"symmetric": True}, "awq", "has zero points"),
        ({"method": "fp8", "group_size": -1}, "fp8", "blocks of 128"),
    ],
)
def test_impossible_formats(settings, format, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**settings).format(format)


def test_refusals(checkpoint_of, tmp_path):  # noqa: F811
    source = open_model(checkpoint_of("llama").folder)
    out = tmp_path / "out"
    with pytest.raises(UnsupportedFeatureError, match="groups of 40 do not divide"):
        quantize_folder(source, recipe("rtn", group_size=40), out)
    with pytest.raises(ConfigError, match="needs a calibration text"):
        quantize_folder(source, recipe("gptq"), out)
    with pytest.raises(ConfigError, match="a shape without weights"):
        quantize_folder(open_model("preset:smollm2-135m"), Recipe("rtn"), out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        quantize_folder(source, recipe("rtn"), out)
    shutil.rmtree(out)
    quantize_folder(source, recipe("rtn"), out)
    with pytest.raises(ConfigError, match="quantised already"):
        quantize_folder(open_model(out), recipe("rtn"), tmp_path / "again")
