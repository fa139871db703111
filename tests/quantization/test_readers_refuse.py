"""Damaged or unsupported quantised checkpoints: one sentence, and planted bugs of the readers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import CheckpointError, MinillmError, UnsupportedFeatureError
from minillm.models.checkpoint import open_model
from minillm.models.loader import load_model
from tests.quantization.test_golden import GOLDEN

Q = "model.layers.0.self_attn.q_proj."


def damaged(name: str, folder: Path, edit=None, settings=None) -> None:
    """Load a golden folder with changed tensors or settings."""
    shutil.copytree(GOLDEN / name, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    if edit is not None:
        edit(tensors)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings or {}
    (folder / "config.json").write_text(json.dumps(config))
    load_model(open_model(folder), torch.float32)


def put(name, change):
    """An edit of one tensor."""

    def edit(tensors):
        tensors[name] = change(tensors[name])

    return edit


def drop(name):
    return lambda tensors: tensors.pop(name)


DAMAGES = {  # golden folder, edit, what the sentence names
    "gptq, no scales": ("gptq-sym", drop(f"{Q}scales"), "scales"),
    "gptq, no zeros": ("gptq-sym", drop(f"{Q}qzeros"), "qzeros"),
    "gptq, no codes": ("gptq-sym", drop(f"{Q}qweight"), "qweight"),
    "gptq, codes cut": ("gptq-sym", put(f"{Q}qweight", lambda t: t[:-1]), "shape"),
    "gptq, zero groups": ("gptq-sym", put(f"{Q}scales", lambda t: t[:0]), "at least one"),
    "gptq, group index high": ("gptq-order", put(f"{Q}g_idx", lambda t: t + 1), "groups"),
    "gptq, group index negative": ("gptq-order", put(f"{Q}g_idx", lambda t: t - 2), "groups"),
    "gptq, float codes": ("gptq-sym", put(f"{Q}qweight", lambda t: t.float()), "float32"),
    "gptq, integer scales": ("gptq-sym", put(f"{Q}scales", lambda t: t.int()), "scales"),
    "gptq, zero points 6": (
        "gptq-sym", put(f"{Q}qzeros", lambda t: torch.full_like(t, 0x66666666)), "symmetric"),
    "gptq, a bias": (
        "gptq-sym", lambda t: t.update({f"{Q}bias": torch.ones(64)}), "not 0"),
    "awq, zeros cut": ("awq", put(f"{Q}qzeros", lambda t: t[:, :-1]), "shape"),
    "awq, one side": ("awq", put(f"{Q}scales", lambda t: t[0]), "2 sides"),
    "awq, no zeros": ("awq", drop(f"{Q}qzeros"), "qzeros"),
    "awq, three groups": ("awq", put(f"{Q}scales", lambda t: t.repeat(2, 1)[:3]), "groups|shape"),
    "nf4, no absmax": ("nf4", drop(f"{Q}weight.absmax"), "absmax"),
    "nf4, absmax cut": ("nf4", put(f"{Q}weight.absmax", lambda t: t[:-3]), "block size"),
    "nf4, no state": (
        "nf4", drop(f"{Q}weight.quant_state.bitsandbytes__nf4"), "quant_state"),
    "nf4, state no JSON": (
        "nf4", put(f"{Q}weight.quant_state.bitsandbytes__nf4", lambda t: t[:-4]), "JSON"),
    "nf4, codes cut": ("nf4", put(f"{Q}weight", lambda t: t[:-1]), "shape"),
    "nf4, table of 8": ("nf4", put(f"{Q}weight.quant_map", lambda t: t[:8]), "shape"),
    "double, no nested": ("nf4-double", drop(f"{Q}weight.nested_absmax"), "nested_absmax"),
    "double, nested cut": (
        "nf4-double", put(f"{Q}weight.nested_absmax", lambda t: t[:0]), "do not fit"),
    "int8, scales cut": ("llm-int8", put(f"{Q}SCB", lambda t: t[:-1]), "shape"),
    "int8, tiles": ("llm-int8", put(f"{Q}weight_format", lambda t: t + 1), "tiles"),
    "fp8, no scale": ("fp8-block", drop(f"{Q}weight_scale_inv"), "weight_scale_inv"),
    "fp8, scales cut": ("fp8-block", put(f"{Q}weight_scale_inv", lambda t: t[:-1]), "shape"),
    "fp8, other type": (
        "fp8-block", put(f"{Q}weight", lambda t: t.to(torch.float8_e5m2)), "float8_e4m3fn"),
    "packed, wrong shape": (
        "pack-sym", put(f"{Q}weight_shape", lambda t: t + 1), "weight_shape"),
    "packed, index high": ("pack-order", put(f"{Q}weight_g_idx", lambda t: t + 9), "groups"),
    "packed, zero points cut": (
        "pack-asym", put(f"{Q}weight_zero_point", lambda t: t[:-1]), "shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_gives_one_sentence(case, tmp_path):
    name, edit, words = DAMAGES[case]
    with pytest.raises(MinillmError, match=words) as found:
        damaged(name, tmp_path, edit)
    assert isinstance(found.value, CheckpointError | UnsupportedFeatureError)
    assert "\n" not in str(found.value)


SETTINGS = {
    "gptq, marlin": ("gptq-sym", {"checkpoint_format": "marlin"}, "marlin"),
    "gptq, rule": ("gptq-sym", {"dynamic": {"-:(": {}}}, "regular expression"),
    "gptq, rules in a list": ("gptq-sym", {"dynamic": [1]}, "dynamic"),
    "gptq, group": ("gptq-sym", {"group_size": "big"}, "group_size"),
    "awq, gemv": ("awq", {"version": "gemv"}, "gemv"),
    "awq, marlin": ("awq", {"version": "marlin"}, "marlin"),
    "awq, 3 bits": ("awq", {"bits": 3}, "3 bits"),
    "fp8, block": ("fp8-block", {"weight_block_size": [0, 1]}, "two sizes"),
    "packed, nvfp4": (
        "pack-sym", {"config_groups": {"g": {"format": "nvfp4-pack-quantized"}}}, "nvfp4"),
    "packed, groups in a list": ("pack-sym", {"config_groups": [1]}, "config_groups"),
    "squeezellm": ("gptq-sym", {"quant_method": "squeezellm"}, "squeezellm"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
def test_an_unsupported_setting_is_named(case, tmp_path):
    name, settings, words = SETTINGS[case]
    with pytest.raises(MinillmError, match=words):
        damaged(name, tmp_path, settings=settings)


@pytest.mark.parametrize("name", ["gptq-sym", "awq", "nf4-double", "fp8-block", "pack-order"])
def test_a_truncated_file_is_refused(name, tmp_path):
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="not a whole"):
        load_model(open_model(tmp_path), torch.float32)


# ---- zero points of either version ---------------------------------------------------------------


def test_symmetric_zero_points_of_the_other_version_are_read(tmp_path, caplog):
    """Some writers store 8 and still name version 1."""

    def as_version_2(tensors):
        for name in [each for each in tensors if each.endswith("qzeros")]:
            tensors[name] = torch.full_like(tensors[name], -0x77777778)

    damaged("gptq-sym", tmp_path, as_version_2)
    assert "another version" in caplog.text
    model, due = (
        load_model(open_model(each), torch.float32) for each in (tmp_path, GOLDEN / "gptq-sym")
    )
    layers = (each.layers[0].mlp.down_proj.values() for each in (model, due))
    assert torch.equal(*layers)


@pytest.mark.parametrize(
    ("name", "declared"), [("gptq-order", "gptq_v2"), ("gptq-v2-order", "gptq")]
)
def test_asymmetric_zero_points_of_the_other_version_are_refused(name, declared, tmp_path):
    with pytest.raises(CheckpointError, match='set "checkpoint_format"'):
        damaged(name, tmp_path, settings={"checkpoint_format": declared})


def test_an_old_file_of_settings_and_biases_of_zeros_are_read(tmp_path):
    damaged("gptq-sym", tmp_path, lambda t: t.update({f"{Q}bias": torch.zeros(64)}))
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert load_model(open_model(tmp_path), torch.float32).layers[0].mlp.down_proj.weight is None


@pytest.mark.parametrize("name", ["fp8-tensor", "float-tensor"])
def test_scales_of_activations_are_left_out(name, tmp_path):
    damaged(name, tmp_path, lambda t: t.update({f"{Q}input_scale": torch.ones(())}))
