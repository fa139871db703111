"""Checkpoints that other tools have written (`golden/README.md`), read to the last bit."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from minillm.layers.linear_methods import Matrix
from minillm.models.checkpoint import open_model
from minillm.models.decoder import Decoder
from minillm.models.loader import load_model
from minillm.quantization.methods import QuantizedMethod
from tests.models.parity import FlatRunner

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(each.parent.name for each in GOLDEN.glob("*/expected.json"))
# Matrices that have no resident form: their blocks of 64 cross rows of 96, or o_proj's do.
DENSE = {"nf4": {"mlp.down_proj"}, "nf4-double": {"mlp.down_proj"}, "fp4": {"mlp.down_proj"}}


def expected(name: str) -> dict:
    return json.loads((GOLDEN / name / "expected.json").read_text())


def opened(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model of a folder."""
    return load_model(open_model(GOLDEN / name), dtype)


def values(model: Decoder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The dense values of each matrix of the layer, by its name in the checkpoint."""
    found = {}
    for matrix in model.layers.modules():
        if not isinstance(matrix, Matrix):
            continue
        method = matrix.method
        dense = (
            method.quantized(matrix).dense(dtype)
            if isinstance(method, QuantizedMethod)
            else matrix.values().to(dtype)
        )
        rows = dense.split([len(part.rows) for part in matrix.parts])
        names = [part.name.removeprefix("model.layers.0.") for part in matrix.parts]
        found |= dict(zip(names, rows, strict=True))
    return found


def compare(name: str) -> None:
    """Every matrix has the bits of the tool, where it computes as the format says."""
    due = expected(name)
    dtypes = {getattr(torch, each["dtype"]) for each in due["matrices"].values()}
    (dtype,) = dtypes
    found = values(opened(name), dtype)
    assert found.keys() == due["matrices"].keys()
    for matrix, each in due["matrices"].items():
        first = torch.tensor(each["first"])
        assert torch.allclose(found[matrix].flatten()[:4].float(), first, rtol=1e-5), matrix
        if due["exact"]:
            data = (found[matrix].contiguous() + 0.0).view(torch.uint8).numpy().tobytes()
            assert hashlib.sha256(data).hexdigest() == each["sha256"], matrix


@pytest.mark.parametrize("name", NAMES)
def test_values_have_the_bits_of_the_tool(name):
    compare(name)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name):
    """Logits within 1e-3 of the largest, in float32."""
    due = expected(name)
    logits, prompt = torch.tensor(due["logits"]), torch.tensor(due["prompt"])
    found = FlatRunner(opened(name), 16, 32, 1).step([(0, prompt)])[0]
    assert (found - logits).abs().max() <= 1e-3 * logits.abs().max()
