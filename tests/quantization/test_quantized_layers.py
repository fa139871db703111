"""Decoders with quantised weights: all layers in one C call, beside layer by layer."""

from dataclasses import replace

import pytest
import torch

from minillm.lab.quantise.fp8 import round_fp8
from minillm.layers.linear_methods import Matrix, frozen
from minillm.layers.mla import MLAttention
from minillm.layers.moe import Router
from minillm.models.packing import list_matrices, pack_weights
from minillm.models.quantize import quantize_weights
from minillm.ops import cpu
from minillm.quantization.methods import QuantizedMethod, install
from minillm.quantization.panels import PanelQuantizedMethod
from tests.ops.small_decoders import CONFIGS, TOLERANCE, forward, new_cache, steps, unpacked
from tests.ops.sparse_decoders import SPARSE

pytestmark = pytest.mark.skipif(
    cpu.functions(torch.bfloat16) is None, reason="there are no C functions for bf16"
)


def quantized(name: str, how: str):
    """A small decoder with quantised weights in panels."""
    model = unpacked((CONFIGS | SPARSE)[name], torch.bfloat16)
    quantize_weights(model, how)
    pack_weights(model)
    return model


@pytest.mark.parametrize("how", ["int8", "int4"])
@pytest.mark.parametrize(
    "name", ["tied", "biases everywhere", "qwen3, with norms of heads", *SPARSE]
)
def test_one_call_is_the_layers_one_by_one(name, how):
    model = quantized(name, how)
    assert model.all_layers is not None
    matrices = [each for each in model.layers.modules() if isinstance(each, Matrix)]
    dense = [each for each in matrices if not isinstance(each.method, PanelQuantizedMethod)]
    absorbed = [each.kv_b_proj for each in model.modules() if isinstance(each, MLAttention)]
    assert all(isinstance(each, Router) or each in absorbed for each in dense)
    at_once, one_by_one = new_cache(model), new_cache(model)
    for batch in steps():
        found = forward(model, batch, at_once)
        due = forward(model, batch, one_by_one, at_once=False)
        found, due = found[: len(due)].nan_to_num(), due.nan_to_num()
        if name in CONFIGS:
            assert torch.equal(found, due)
        else:  # torch's softmax of the router differs in the last bits
            assert (found - due).norm() < TOLERANCE[torch.bfloat16] * due.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("name", ["biases everywhere", *SPARSE])
def test_one_call_with_fp8_weights(name, dtype):
    """Also in float32: activations are not rounded."""
    if cpu.functions(dtype) is None:
        pytest.skip("there are no C functions for this type")
    model = unpacked((CONFIGS | SPARSE)[name], dtype)
    for matrix in list_matrices(model):
        if not isinstance(matrix, Router) and matrix.out_features:
            found = round_fp8(matrix.values().flatten(0, -2))
            whole = replace(found, scales=found.scales.log2().round().exp2())  # exact in bf16
            install(matrix, whole, dtype)
    due_values = [each.values().flatten(0, -2) for each in list_matrices(model)]
    dense = unpacked((CONFIGS | SPARSE)[name], dtype)
    for matrix, values in zip(list_matrices(dense), due_values, strict=True):
        matrix.weight = frozen(values.view(matrix.shape))
    pack_weights(model)
    assert model.all_layers is not None
    fp8 = [each for each in list_matrices(model) if isinstance(each.method, PanelQuantizedMethod)]
    assert len(fp8) >= 4 * len(model.layers)
    caches = new_cache(model), new_cache(model), new_cache(dense)
    for batch in steps():
        found = forward(model, batch, caches[0])
        one_by_one = forward(model, batch, caches[1], at_once=False)
        due = forward(dense, batch, caches[2], at_once=False)
        found = found[: len(due)].nan_to_num()
        one_by_one, due = one_by_one[: len(due)].nan_to_num(), due.nan_to_num()
        assert (found - one_by_one).norm() < TOLERANCE[dtype] * one_by_one.norm()
        errors = (found - due).norm(dim=1) / due.norm(dim=1).clamp(min=1e-30)
        assert errors.median() < TOLERANCE[dtype]  # some rows may be routed to other experts


@pytest.mark.parametrize("how", ["int8", "int4"])
def test_values_and_rows_survive_packing(how):
    plain = unpacked(CONFIGS["tied"], torch.bfloat16)
    quantize_weights(plain, how)
    before = [each.values() for each in plain.modules() if isinstance(each, Matrix)]
    ids = torch.tensor([0, 95, 31, 32])
    rows = plain.embedding(ids)
    pack_weights(plain)
    after = [each.values() for each in plain.modules() if isinstance(each, Matrix)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(plain.embedding(ids), rows)


def test_fp8_rows_survive_packing():
    """A tied embedding in FP8 with a NaN, which makes its group of the product NaN."""
    model = unpacked(CONFIGS["tied"], torch.bfloat16)
    found = round_fp8(model.embedding.values())
    install(model.embedding, found, torch.bfloat16)
    ids = torch.tensor([0, 95, 31, 32])
    rows = model.embedding(ids)
    pack_weights(model)
    assert isinstance(model.embedding.method, PanelQuantizedMethod)
    assert torch.equal(model.embedding(ids), rows)


def test_what_c_does_not_read_is_made_dense_once(monkeypatch):
    """All of a model in float32, or without C: the values stay, nothing is unpacked for a call."""
    for setting in ("1", "0"):
        monkeypatch.setenv(cpu.PANELS, setting)
        model = unpacked(CONFIGS["tied"], torch.float32)
        quantize_weights(model, "int4")
        batch = next(iter(steps()))
        due = forward(model, batch, new_cache(model), at_once=False).nan_to_num()
        pack_weights(model)
        methods = [type(each.method) for each in list_matrices(model)]
        assert QuantizedMethod not in methods
        assert PanelQuantizedMethod not in methods
        found = forward(model, batch, new_cache(model)).nan_to_num()[: len(due)]
        assert (found - due).norm() < TOLERANCE[torch.float32] * due.norm()
