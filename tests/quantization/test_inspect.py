"""`minillm inspect`: formats, bytes and checks of whole folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.cli import main
from minillm.lab.commands.inspect import inspect_folder
from tests.quantization.test_golden import DENSE, GOLDEN, NAMES

BITS = {"gptq-sym": 4.75, "nf4": 4.5625, "fp8-block": 9.0, "llm-int8": 8.5, "pack-asym": 4.75}


@pytest.mark.parametrize("name", NAMES)
def test_every_matrix_is_described(name):
    found = inspect_folder(str(GOLDEN / name))
    checks = [each for kind in found.kinds for each in kind.checks]
    assert len(checks) == 9  # 7, embedding, lm_head
    assert all(each.finite for each in checks)
    layouts = {kind.names: kind.layout for kind in found.kinds}
    dense = {each for each, layout in layouts.items() if layout == "dense"}
    assert dense == {"embed_tokens", "lm_head"} | {
        each.rpartition(".")[2] for each in DENSE.get(name, ())
    }


@pytest.mark.parametrize("name", BITS)
def test_bytes_include_scales(name):
    """q, k and v: 128 rows of 64 columns."""
    kind = next(k for k in inspect_folder(str(GOLDEN / name)).kinds if "q_proj" in k.names)
    assert kind.bits == pytest.approx(BITS[name], abs=0.001)
    assert kind.num_bytes == int(kind.bits * 128 * 64 / 8)


def test_error_against_the_same_values_is_zero_and_against_others_is_not(tmp_path):
    """The reference: the dequantised values themselves, then with one of them changed."""
    from tests.quantization.test_golden import opened, values

    name = "gptq-sym"
    shutil.copytree(GOLDEN / name, tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    kept = load_file(tmp_path / "model.safetensors")
    kept = {k: v for k, v in kept.items() if k.endswith(".weight")}
    dense = values(opened(name), torch.float32)
    weights = {f"model.layers.0.{k}.weight": v.clone() for k, v in dense.items()}
    weights["model.layers.0.mlp.down_proj.weight"][0] *= 2
    save_file(kept | weights, tmp_path / "model.safetensors")
    checks = [c for k in inspect_folder(str(GOLDEN / name), str(tmp_path)).kinds for c in k.checks]
    errors = {each.name.rpartition(".")[2]: each.error for each in checks}
    changed = errors.pop("down_proj")
    assert changed > 0.01
    assert all(each < 4e-3 for each in errors.values())  # bf16 embedding
    assert errors["q_proj"] == errors["gate_proj"] == 0


def test_json_and_a_value_that_is_not_finite(tmp_path, capsys):
    shutil.copytree(GOLDEN / "awq", tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"][0, 0] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    bad = [c["name"] for kind in found["kinds"] for c in kind["checks"] if not c["finite"]]
    assert bad == ["model.layers.0.mlp.up_proj"]
    assert main(["inspect", str(tmp_path), "--against", str(GOLDEN / "nf4")]) == 2
    assert "quantised" in capsys.readouterr().err
