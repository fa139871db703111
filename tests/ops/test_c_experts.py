"""Experts, routing and latent attention in C, against float64, torch's router and the decoder layer
by layer."""

from ctypes import POINTER, byref, c_int64, c_void_p
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from minillm.models.all_layers import AllLayers
from minillm.ops import cpu, cpu_experts
from minillm.ops.c_library import library
from minillm.ops.cpu_experts import ExpertShape
from minillm.ops.cpu_latent import head_linear
from minillm.ops.cpu_quantized import MatrixParts
from minillm.ops.cpu_structures import filled, structure_of
from minillm_kernels import reference
from tests.ops.c_variants import ELEMENTS, built, parameters, poisoned, torch_threads, use
from tests.ops.small_decoders import (
    F32,
    TOLERANCE,
    bits,
    build,
    check_near,
    exact_steps,
    forward,
    new_cache,
    steps,
)
from tests.ops.sparse_decoders import LATENT, MIXED, QWEN, SPARSE
from tests.ops.test_c_halves import layers_of, run

pytestmark = pytest.mark.usefixtures("panels")
ROUTES = {
    "softmax": ExpertShape(64, 8, 3, 64),
    "not normalised, scaled": ExpertShape(64, 8, 3, 64, normalize=False, factor=1.7),
    "sigmoid": ExpertShape(64, 128, 8, 64, sigmoid=True, factor=2.5),
    "best groups": ExpertShape(64, 16, 4, 64, groups=4, top_groups=2),
    "groups by their two best": ExpertShape(
        64, 16, 6, 64, sigmoid=True, groups=4, top_groups=2, best_two=True
    ),
    "all": ExpertShape(64, 8, 8, 64),
    "one": ExpertShape(64, 8, 1, 64, groups=8, top_groups=1),
}


# ---- routing -------------------------------------------------------------------------------------


def route(shape: ExpertShape, logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What C chooses: weights and ids [N, k], ids ascending."""
    choose = library("F32").choose_experts
    choose.restype = None
    choose.argtypes = POINTER(structure_of(ExpertShape)), *[c_void_p] * 4, c_int64
    logits, count = logits.clone(), len(logits)
    ids = torch.full((count, shape.chosen), -1)
    weights = torch.full((count, shape.chosen), float("nan"))
    at = None if bias is None else bias.data_ptr()
    where = logits.data_ptr(), at, ids.data_ptr(), weights.data_ptr()
    choose(byref(filled(shape)), *where, count)
    return weights, ids


def expected_route(shape: ExpertShape, logits: Tensor, bias: Tensor | None):
    scores = logits.sigmoid() if shape.sigmoid else logits.softmax(-1)
    how = shape.groups, shape.top_groups, "top2" if shape.best_two else "max", shape.normalize
    weights, ids = reference.moe_route(scores, bias, shape.chosen, *how)
    order = ids.argsort(-1)
    return (weights * shape.factor).gather(1, order), ids.gather(1, order)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ROUTES)
def test_the_router_chooses_as_torch_does(name, biased):
    shape, generator = ROUTES[name], torch.Generator().manual_seed(0)
    logits = torch.randn(70, shape.experts, generator=generator) * 2
    bias = torch.randn(shape.experts, generator=generator) * 0.3 if biased else None
    weights, ids = route(shape, logits, bias)
    expected, chosen = expected_route(shape, logits, bias)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_extreme_logits_and_nan(sigmoid):
    """Experts of a token with NaN exist and differ; other tokens do not change."""
    shape = replace(ROUTES["softmax"], sigmoid=sigmoid, normalize=False)
    logits = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    logits[1, 5] = float("nan")
    logits[2] = torch.tensor([-200.0, 100, 3, -90, 0, 1, 2, -1e30])
    weights, ids = route(shape, logits, None)
    assert all(len(set(row)) == 3 and row[0] >= 0 and row[2] < 8 for row in ids.tolist())
    expected, chosen = expected_route(shape, logits, None)
    assert weights[1].isnan().any()
    if sigmoid:  # with a softmax, all its scores are NaN
        assert 5 in ids[1].tolist()
    for row in (0, 2, 3):
        got, wanted = weights[row].sort().values, expected[row].sort().values  # zeros are equal
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-30)
    assert torch.equal(ids[[0, 3]], chosen[[0, 3]])


# ---- products ------------------------------------------------------------------------------------


def packed(weight: Tensor) -> Tensor:
    """[.., out, in] -> panels"""
    weight = weight.flatten(0, -2)
    found = torch.empty(cpu.panels_shape(*weight.shape), dtype=weight.dtype)
    cpu.pack_panels(weight, found)
    return found


def exact_experts(x, gate_up, down, weights, ids) -> Tensor:
    """Every token and choice by itself, in float64."""
    x, gate_up, down = x.double(), gate_up.double(), down.double()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for weight, expert in zip(weights[token], ids[token], strict=True):
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            out[token] += weight.double() * (down[expert] @ (gate * gate.sigmoid() * up))
    return out


def panel_experts(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Experts whose weights are not quantised."""
    return cpu_experts.panel_experts(x, MatrixParts(gate_up), MatrixParts(down), weights, ids)


CHOICES = {  # of 6 experts
    "any": lambda n: torch.stack([torch.randperm(6)[:3] for _ in range(n)]),
    "all tokens to one expert": lambda n: torch.full((n, 1), 4),
    "experts without tokens": lambda n: torch.tensor([[5, 0]]).repeat(n, 1),
    "one expert twice": lambda n: torch.tensor([[2, 3, 2]]).repeat(n, 1),
}


@pytest.mark.parametrize("count", [1, 2, 17, 70])
@pytest.mark.parametrize("name", CHOICES)
def test_chosen_experts(name, count, dtype):
    torch.manual_seed(count)
    x = torch.randn(count, 96).to(dtype)
    gate_up, down = (torch.randn(6, 128, 96) * 0.2).to(dtype), (torch.randn(6, 96, 64) * 0.2)
    down = down.to(dtype)
    ids = CHOICES[name](count)
    weights = torch.rand(ids.shape)
    got = panel_experts(
        poisoned(x), poisoned(packed(gate_up)), poisoned(packed(down)), weights, ids
    )
    exact = exact_experts(x, gate_up, down, weights, ids)
    for row in range(count):
        assert (got[row] - exact[row]).norm() < TOLERANCE[dtype] * exact[row].norm()


def test_more_tokens_than_are_processed_together():
    torch.manual_seed(0)
    x, ids = torch.randn(1030, 32), torch.randint(0, 4, (1030, 2))
    gate_up, down = torch.randn(4, 64, 32) * 0.2, torch.randn(4, 32, 32) * 0.2
    weights = torch.rand(1030, 2)
    got = panel_experts(x, packed(gate_up), packed(down), weights, ids)
    expected = reference.moe_experts(x, gate_up, down, weights, ids)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def of_nan(size: int, dtype: torch.dtype) -> Tensor:
    """Memory whose bytes are NaN as float32 and as bf16."""
    assert dtype == torch.uint8
    return torch.full((size,), 255, dtype=dtype)


def check_pieces() -> None:
    """Pieces of a job, in any order, give the bits of one piece."""
    torch.manual_seed(0)
    x, ids, weights = torch.randn(9, 256), torch.randint(0, 8, (9, 4)), torch.rand(9, 4)
    gate_up, down = torch.randn(8, 512, 256) * 0.1, torch.randn(8, 256, 256) * 0.1
    given = x, packed(gate_up), packed(down), weights, ids
    heads = torch.randn(9, 24, 128), packed(torch.randn(24, 256, 128))
    results = []
    for count in (1, 3):
        with torch_threads(count):
            with patch.object(torch, "empty", of_nan):  # not the results of an earlier call
                experts = panel_experts(*given)
            results.append((experts, head_linear(*heads, 256)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
    torch.testing.assert_close(
        results[1][0], reference.moe_experts(x, gate_up, down, weights, ids), rtol=1e-4, atol=1e-4
    )


def test_several_threads_give_the_bits_of_one():
    check_pieces()


def test_a_token_with_nan_stays_alone():
    torch.manual_seed(0)
    x, ids = torch.randn(20, 32), torch.randint(0, 4, (20, 2))
    gate_up, down = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
    weights = torch.rand(20, 2)
    x[7, 3] = float("nan")
    got = panel_experts(x, packed(gate_up), packed(down), weights, ids)
    assert got[7].isnan().all()
    assert not got[torch.arange(20) != 7].isnan().any()


def test_what_experts_cannot_be_is_an_error():
    gate_up, down = packed(torch.zeros(4, 64, 32)), packed(torch.zeros(4, 32, 32))
    x, weights, ids = torch.zeros(2, 32), torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    for wrong in (4, -1):
        ids[1, 1] = wrong
        with pytest.raises(IndexError, match="An expert id is outside of 0 to 3"):
            panel_experts(x, gate_up, down, weights, ids)
    with pytest.raises(ValueError, match="does not fit the experts' panels"):
        panel_experts(torch.zeros(2, 64), gate_up, down, weights, ids)
    with pytest.raises(ValueError, match="both must be"):
        panel_experts(x, gate_up, down, weights[:1], ids)
    assert panel_experts(x[:0], gate_up, down, weights[:0], ids[:0]).shape == (0, 32)


@pytest.mark.parametrize("count", [1, 9, 40])
def test_a_product_for_each_head(count, dtype):
    torch.manual_seed(count)
    wide = torch.randn(count, 3, 80).to(dtype)
    weight = (torch.randn(3, 96, 64) * 0.2).to(dtype)
    x = wide[:, :, :64]
    got = head_linear(x, packed(weight), 96)
    exact = torch.einsum("nhi,hoi->nho", x.double(), weight.double())
    assert (got - exact).norm() < TOLERANCE[dtype] / 5 * exact.norm()
    with pytest.raises(ValueError, match="does not fit panels"):
        head_linear(wide, packed(weight), 96)


# ---- all layers in one call ----------------------------------------------------------------------


def check_one_call(name: str, dtype: torch.dtype) -> None:
    """Prompts, chunks and single tokens, alone and together, against torch in float64, and against
    the same products layer by layer."""
    model = build(SPARSE[name], dtype=dtype)
    assert isinstance(model.all_layers, AllLayers)
    mine, theirs = new_cache(model), new_cache(model)
    near = 1e-5 if dtype == F32 else 2e-3
    for batch, exact in zip(steps(padded=False), exact_steps(model.config), strict=True):
        got = forward(model, batch, mine)
        check_rows(got, exact)
        other = forward(model, batch, theirs, at_once=False)
        assert (got - other).norm() < near * other.norm()
    for batch in steps()[:4]:  # with padding
        assert not forward(model, batch, mine)[: int(batch.query_start[-1])].isnan().any()


def check_rows(got: Tensor, exact: Tensor) -> None:
    """Near float64: all rows in float32, most rows in bf16, where a rounded hidden state can be
    routed to another expert."""
    if got.dtype == F32:
        check_near(got, exact)
        return
    errors = (got.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert errors.median() < TOLERANCE[got.dtype]


@pytest.mark.parametrize("name", SPARSE)
def test_one_call_is_the_decoder(name, dtype):
    check_one_call(name, dtype)


BUILDS = [("tiles in C", "BF16"), ("no pairs", "BF16"), ("AVX2", "F32"), ("baseline", "F32")]


@pytest.mark.parametrize("variant", parameters(*BUILDS))
def test_every_kind_of_processor(variant, monkeypatch):
    path, element = variant
    use(monkeypatch, built(path, element), ELEMENTS[element])
    for name in ("experts in some layers", "deepseek v3"):
        check_one_call(name, ELEMENTS[element])


@pytest.mark.parametrize("name", ["qwen3 with experts", "deepseek v2", "deepseek v3"])
def test_halves_are_the_outputs_of_attention_and_experts(name, dtype):
    """As tensor parallelism runs them: one after the other they are the one call."""
    model = build(SPARSE[name], dtype=dtype)
    mine, one = new_cache(model), new_cache(model)
    by_halves, at_once, halves = layers_of(model, mine), layers_of(model, one), []
    for batch in steps():
        halves.clear()
        got = run(by_halves, model, batch, lambda x: halves.append(x.clone()))
        assert len(halves) == 2 * model.config.num_layers
        count = int(batch.query_start[-1])
        for each, expected in zip(got, run(at_once, model, batch), strict=True):
            assert torch.equal(each[:count], expected[:count])
    assert torch.equal(bits(mine.key), bits(one.key))


# ---- when it steps aside, and errors -------------------------------------------------------------

TOO_ODD = {
    "experts of 40 units": replace(QWEN, moe=replace(MIXED, intermediate_size=40)),
    "shared experts of 40 units": replace(QWEN, moe=replace(MIXED, shared_intermediate_size=40)),
    "a latent of 48": replace(LATENT, mla=replace(LATENT.mla, kv_lora_rank=48)),
    "heads of 24": replace(LATENT, mla=replace(LATENT.mla, qk_nope_head_dim=24)),
    "values of 16": replace(LATENT, mla=replace(LATENT.mla, v_head_dim=16)),
    "8 rotated dimensions": replace(LATENT, mla=replace(LATENT.mla, qk_rope_head_dim=8)),
}


@pytest.mark.parametrize("name", TOO_ODD)
def test_sizes_that_are_not_whole_panels_are_not_taken(name):
    """They run layer by layer, and are right."""
    model = build(TOO_ODD[name], dtype=F32)
    assert model.all_layers is None
    kv = new_cache(model)
    for batch, exact in zip(steps(padded=False), exact_steps(model.config), strict=True):
        check_near(forward(model, batch, kv), exact)
