"""Decoders with quantised weights: all layers in one C call, beside layer by layer."""

import pytest
import torch

from minillm.layers.linear_methods import Matrix
from minillm.layers.mla import MLAttention
from minillm.layers.moe import Router
from minillm.models.packing import pack_weights
from minillm.models.quantize import quantize_weights
from minillm.ops import cpu
from minillm.quantization.panels import PanelQuantizedMethod
from tests.ops.small_decoders import (
    CONFIGS,
    TOLERANCE,
    forward,
    new_cache,
    steps,
    unpacked,
)
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
    "name",
    ["tied", "biases everywhere", "qwen3, with norms of heads", *SPARSE],
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
