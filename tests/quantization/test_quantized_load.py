"""Reading a quantised checkpoint and quantising while loading, beside transformers with the same
dense weights."""

import copy

import pytest
import torch

from minillm.errors import UnsupportedFeatureError
from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.models.quantize import quantize_weights
from minillm.quantization.methods import QuantizedMethod
from tests.models.conftest import checkpoint_of  # noqa: F401
from tests.models.parity import FlatRunner
from tests.models.tiny import Checkpoint, prompt

F32 = torch.float32
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
