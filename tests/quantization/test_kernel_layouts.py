"""Quantised matrices in the layouts of the Triton kernels: their values and rows stay the same."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minillm.layers.linear import Embedding, Linear
from minillm.layers.linear_methods import Matrix
from minillm.ops import dispatch
from minillm.ops.dispatch import Backend
from minillm.quantization.kernels import (
    KernelQuantizedMethod,
    StackedQuantizedMethod,
    pack_for_kernels,
)
from minillm.quantization.methods import QuantizedMethod, install
from minillm.quantization.quantized import Quantized, integer_codes
from tests.models.tiny import Tiny

CPU = torch.device("cpu")
OUT, WIDTH = 200, 256


def four_bits(rng: torch.Generator, group: int, **offset: Tensor) -> Quantized:
    """4-bit codes with scales of both signs."""
    codes = integer_codes(torch.randint(0, 16, (OUT, WIDTH), generator=rng), 4)
    return Quantized(codes, torch.randn(OUT, WIDTH // group, generator=rng).half(), **offset)


def eight_bits(rng: torch.Generator, scales: Tensor, dtype: torch.dtype) -> Quantized:
    """8-bit codes."""
    return Quantized(torch.randn(OUT, WIDTH, generator=rng).mul(20).to(dtype), scales)


def blocks(rng: torch.Generator) -> Tensor:
    """Scales of blocks of 128 x 128, for each row."""
    return torch.rand(2, 2, generator=rng).repeat_interleave(128, 0)[:OUT]


def zeros(rng: torch.Generator, groups: int) -> Tensor:
    return torch.randint(0, 17, (OUT, groups), generator=rng).to(torch.int8)


FORMATS: dict[str, Callable[[torch.Generator], Quantized]] = {
    "int4 with zeros": lambda rng: four_bits(rng, 64, zeros=zeros(rng, 4)),
    "int4 with minima": lambda rng: four_bits(
        rng, 32, minima=torch.randn(OUT, 8, generator=rng).half()
    ),
    "int4 in act order": lambda rng: four_bits(
        rng, 128, zeros=zeros(rng, 2), order=torch.randperm(WIDTH, generator=rng)
    ),
    "int8 rows": lambda rng: eight_bits(rng, torch.rand(OUT, 1, generator=rng), torch.int8),
    "int8 groups": lambda rng: eight_bits(rng, torch.rand(OUT, 8, generator=rng), torch.int8),
    "e4m3 rows": lambda rng: eight_bits(
        rng, torch.rand(OUT, 1, generator=rng), torch.float8_e4m3fn
    ),
    "e4m3 blocks": lambda rng: eight_bits(rng, blocks(rng), torch.float8_e4m3fn),
    "e4m3 groups": lambda rng: eight_bits(
        rng, torch.rand(OUT, 2, generator=rng), torch.float8_e4m3fn
    ),
}
OTHERS: dict[str, Callable[[torch.Generator], Quantized]] = {
    "nf4": lambda rng: four_bits(rng, 64, table=torch.linspace(-1, 1, 16)),
    "groups of 16": lambda rng: four_bits(rng, 16),
    "int8 with zeros": lambda rng: Quantized(
        torch.ones(OUT, WIDTH, dtype=torch.int8), torch.ones(OUT, 1), zeros(rng, 1)
    ),
}


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("triton", "pretended"))


def layer(found: Quantized, kind: type[Matrix] = Linear) -> Matrix:
    matrix = Linear("", WIDTH, {"w": OUT}) if kind is Linear else Embedding("w", OUT, WIDTH)
    install(matrix, found, torch.float32)
    return matrix


@pytest.mark.parametrize("kind", [Linear, Embedding])
@pytest.mark.parametrize("name", FORMATS)
def test_values_and_rows_are_those_of_the_file(name, kind):
    found = FORMATS[name](torch.Generator().manual_seed(3))
    matrix = layer(found, kind)
    assert pack_for_kernels(matrix, CPU) == 1
    assert type(matrix.method) is KernelQuantizedMethod
    assert torch.equal(matrix.values(), found.dense())
    ids = torch.tensor([0, 199, 127, 128, 5, 5])
    assert torch.equal(matrix.method.lookup(matrix, ids), found.dense()[ids])
    assert matrix.num_bytes <= found.num_bytes


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_stay_as_they_are(name):
    found = OTHERS[name](torch.Generator().manual_seed(5))
    matrix = layer(found)
    assert pack_for_kernels(matrix, CPU) == 0
    assert type(matrix.method) is QuantizedMethod
    assert torch.equal(matrix.values(), found.dense())


def test_without_kernels_nothing_changes(monkeypatch):
    monkeypatch.setattr(dispatch, "backend_of", lambda device: Backend("reference", ""))
    matrix = layer(FORMATS["int8 rows"](torch.Generator().manual_seed(6)))
    assert pack_for_kernels(matrix, CPU) == 0
    assert type(matrix.method) is QuantizedMethod


def test_parts_that_need_more_than_products_stay(tmp_path):
    from minillm.models.checkpoint import open_model
    from minillm.models.loader import load_model
    from minillm.models.quantize import quantize_weights

    model = load_model(open_model(Tiny("deepseek_v2").write(tmp_path).folder), torch.float32)
    quantize_weights(model, "int8")
    assert pack_for_kernels(model, CPU) > 0
    kinds = {
        name.rsplit(".", 1)[-1]: type(each.method)
        for name, each in model.named_modules()
        if isinstance(each, Matrix)
    }
    assert kinds["o_proj"] is KernelQuantizedMethod
    assert kinds["kv_b_proj"] is not KernelQuantizedMethod
    assert kinds["gate_up"] is StackedQuantizedMethod


@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_are_those_that_the_router_chose(tokens, monkeypatch):
    """Few choices take a copy for each, many take all experts; neither looks at the choices."""
    monkeypatch.setattr(dispatch, "uses_kernels", lambda *tensors: False)
    monkeypatch.setattr("minillm.ops.uses_kernels", lambda *tensors: False)
    rng = torch.Generator().manual_seed(7)
    stacks = []
    for out, width in ((64, 32), (32, 32)):
        from minillm.layers.linear_methods import WeightSlice

        parts = [WeightSlice.whole(f"{expert}", out, width) for expert in range(6)]
        matrix = Matrix(parts, 6)
        codes = torch.randint(-127, 128, (6 * out, width), generator=rng).to(torch.int8)
        install(matrix, Quantized(codes, torch.rand(6 * out, 1, generator=rng) / 50), torch.float32)
        stacks.append(matrix)
    x = torch.randn(tokens, 32, generator=rng)
    ids = torch.stack([torch.randperm(6, generator=rng)[:2] for _ in range(tokens)])
    weights = torch.rand(tokens, 2, generator=rng)
    due = stacks[0].method.experts(*stacks, x, weights, ids, False)
    for each in stacks:
        pack_for_kernels(each, CPU)
        assert type(each.method) is StackedQuantizedMethod
    found = stacks[0].method.experts(*stacks, x, weights, ids, False)
    assert torch.allclose(found, due, atol=1e-5)
