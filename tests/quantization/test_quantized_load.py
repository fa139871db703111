"""Reading a quantised checkpoint and quantising while loading, beside transformers with the same
dense weights."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from minillm.errors import CheckpointError, UnsupportedFeatureError
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.models.quantize import quantize_weights
from minillm.quantization.integers import pack_words, split_bytes
from minillm.quantization.methods import QuantizedMethod
from minillm.quantization.rounding import round_asymmetric, round_symmetric
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.parity import FlatRunner
from tests.models.tiny import Checkpoint, prompt

F32 = torch.float32
SETTINGS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}
    },
    "ignore": ["lm_head"],
}
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3")


def logits(model: Decoder) -> torch.Tensor:
    """Logits [20, V] of a fixed prompt."""
    return FlatRunner(model, 16, 32, 1).step([(0, prompt(20))])[0]


def dense_reference(checkpoint: Checkpoint, model: Decoder) -> torch.Tensor:
    """Logits of transformers with the dense values of a quantised model's matrices."""
    reference = copy.deepcopy(checkpoint.reference)
    state = reference.state_dict()
    for matrix in model.modules():
        if not isinstance(matrix, Matrix) or not isinstance(matrix.method, QuantizedMethod):
            continue
        rows = matrix.values().flatten(0, -2)
        for part, values in zip(
            matrix.parts, rows.split([len(p.rows) for p in matrix.parts]), strict=True
        ):
            put(state, f"{part.name}.weight", values)
    with torch.no_grad():
        return reference(prompt(20)[None]).logits[0]


def put(state: dict[str, torch.Tensor], name: str, values: torch.Tensor) -> None:
    """Store a weight in a transformers model, which keeps experts stacked."""
    name = name.replace("block_sparse_moe", "mlp")  # Mixtral
    if name in state:
        state[name].copy_(values)
        return
    stem, expert, kind = name.removesuffix(".weight").rsplit(".", 2)
    if kind in ("down_proj", "w2"):
        state[f"{stem}.down_proj"][int(expert)].copy_(values)
        return
    half = len(values)
    start = 0 if kind in ("gate_proj", "w1") else half
    state[f"{stem}.gate_up_proj"][int(expert), start : start + half].copy_(values)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_quantised_while_loading_equals_transformers_with_the_same_values(
    checkpoint_of,  # noqa: F811
    family,
    how,
):
    checkpoint = checkpoint_of(family)
    model = load_model(open_model(checkpoint.folder), F32)
    before = logits(model)
    if how == "int4" and family in ("qwen3_moe", "deepseek_v3"):
        with pytest.raises(UnsupportedFeatureError, match="cannot be divided"):
            quantize_weights(model, how)
        return
    quantize_weights(model, how)
    found, due = logits(model), dense_reference(checkpoint, model)
    assert (found - due).abs().max() <= 1e-4 * due.abs().max()
    assert (found - before).abs().max() > 1e-4 * due.abs().max()  # it is quantised at all


def write_packed(checkpoint: Checkpoint, folder: Path, symmetric: bool) -> dict[str, torch.Tensor]:
    """Replace all MLP weights by 4-bit codes in compressed-tensors' layout. Their values."""
    shutil.copytree(checkpoint.folder, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    values = {}
    for name in [each for each in tensors if ".mlp." in each]:
        weight, stem = tensors.pop(name), name.removesuffix("weight")
        found = round_symmetric(weight, 4, 32) if symmetric else round_asymmetric(weight, 4, 32)
        values[name] = found.dense()
        tensors[f"{stem}weight_packed"] = pack_words(split_bytes(found.codes), 4)
        tensors[f"{stem}weight_scale"] = found.scales
        tensors[f"{stem}weight_shape"] = torch.tensor(found.shape)
        if not symmetric:
            zeros = pack_words(found.zeros.T.contiguous(), 4).T.contiguous()
            tensors[f"{stem}weight_zero_point"] = zeros
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return values


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_codes_are_read_exactly(checkpoint_of, tmp_path, symmetric):  # noqa: F811
    values = write_packed(checkpoint_of("llama, tied"), tmp_path, symmetric)
    model = load_model(open_model(tmp_path), F32)
    for layer, each in enumerate(model.layers):
        name = f"model.layers.{layer}.mlp."
        parts = [values[f"{name}{part}.weight"] for part in ("gate_proj", "up_proj")]
        assert torch.equal(each.mlp.gate_up_proj.values(), torch.cat(parts))
        assert torch.equal(each.mlp.down_proj.values(), values[f"{name}down_proj.weight"])
        assert isinstance(each.mlp.down_proj.method, QuantizedMethod)


def test_a_missing_scale_is_named(checkpoint_of, tmp_path):  # noqa: F811
    write_packed(checkpoint_of("llama, tied"), tmp_path, True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight_scale"):
        load_model(open_model(tmp_path), F32)
