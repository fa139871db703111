"""Chapter 13's own functions: formats against published dequantisers, quality, bytes, products."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from minillm.gguf.types import TYPES
from minillm.models.presets import preset
from minillm.plan.cost import step_cost, weight_bytes
from minillm.quantization.gguf.blocks import DECODERS
from minillm.quantization.making import quantize_parts
from minillm.quantization.recipe import Recipe
from minillm.quantization.writers.bitsandbytes import BitsAndBytesWriter
from minillm_exercises.chapters import ch13, ch13_pictures
from minillm_exercises.chapters.ch13 import Format
from minillm_exercises.chapters.quality import Quality, Subject

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(64, 512, generator=GENERATOR)


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject()


@pytest.fixture
def captions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    seen: list[str] = []
    monkeypatch.setattr(ch13_pictures, "show", lambda fig, caption: seen.append(caption))
    return seen


# Formats -------------------------------------------------------------------------------------


def test_q4_0_is_that_of_the_public_package():
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType.Q4_0
    theirs = quants.dequantize(quants.quantize(WEIGHT.numpy(), kind), kind)
    assert np.array_equal(ch13.q4_0(WEIGHT).numpy(), theirs)


def test_q4_0_of_zeros_is_zeros():
    assert not ch13.q4_0(torch.zeros(2, 64)).any()


def test_q4_k_has_the_error_that_is_known_for_normal_weights():
    """About 0.07 of the weights with searched grids, a little more without."""
    error = (ch13.q4_k(WEIGHT) - WEIGHT).norm() / WEIGHT.norm()
    assert 0.07 < error < 0.085
    assert not ch13.q4_k(torch.zeros(2, 256)).any()


def test_fp8_is_exact_at_powers_of_two_and_at_the_largest():
    row = torch.tensor([[448.0, 2.0, -0.25, 17.0]])
    assert ch13.fp8(row).tolist() == [[448.0, 2.0, -0.25, 16.0]]  # 17 is between 16 and 18


# Quality -------------------------------------------------------------------------------------


def test_an_unchanged_model_is_no_distance_away(tiny):
    found = tiny.judge(lambda name, weight: weight)
    assert found.kl == 0
    assert found.same == 1
    assert 1.0 < found.bits < 1.5


def test_a_change_is_seen_and_undone(tiny):
    worse = tiny.judge(lambda name, weight: weight + 0.02 * weight.abs().mean() * weight.sign())
    assert worse.kl > 0
    assert tiny.judge(lambda name, weight: weight).kl == 0


def test_kl_is_the_mean_over_positions(tiny):
    """Against torch's own, with other weights in one matrix."""
    name = "6.down_proj"
    other = {**tiny.weights, name: 0.9 * tiny.weights[name]}
    with tiny.changed(other):
        laws = torch.cat(tiny._laws())
    own = torch.cat(tiny._own)
    want = torch.nn.functional.kl_div(laws, own, log_target=True, reduction="batchmean")
    found = tiny.judge(lambda at, weight: other[at])
    assert found.kl == pytest.approx(float(want), rel=1e-4)


def test_inputs_multiply_to_what_the_model_computes(tiny):
    inputs = tiny.inputs(600)
    assert {name: tuple(x.shape) for name, x in inputs.items() if name[0] == "0"} == {
        "0.qkv_proj": (600, 256),
        "0.o_proj": (600, 256),
        "0.gate_up_proj": (600, 256),
        "0.down_proj": (600, 768),
    }
    gate, up = (inputs["3.gate_up_proj"] @ tiny.weights["3.gate_up_proj"].T).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    assert torch.allclose(inputs["3.down_proj"], want, rtol=1e-4, atol=1e-5)


# Bytes ---------------------------------------------------------------------------------------


def test_bytes_in_16_bits_are_those_of_the_cost_model():
    for name in ("smollm2-135m", "llama-3.1-8b"):
        config = preset(name)
        cost = step_cost(config, [1], [1], dtype="bfloat16").weight_bytes
        assert ch13.step_bytes(config, 16, 16) == pytest.approx(cost, rel=1e-3)  # but for norms
        assert ch13.file_bytes(config, 16) == pytest.approx(weight_bytes(config), rel=1e-3)


def test_claim_j10():
    config = preset("llama-3.1-8b")
    assert ch13.file_bytes(config, 4 + 20 / 128) / 1e9 == pytest.approx(5.73, abs=0.005)
    assert ch13.file_bytes(config, 8) / 1e9 == pytest.approx(9.08, abs=0.005)


@pytest.mark.parametrize(("double", "bits"), [(False, 4.5), (True, 4.127)])
def test_claims_j2_and_j3(double, bits):
    """The bytes that are written of a matrix, without the tables that all weights share."""
    recipe = Recipe("nf4", double=double)
    (made,) = quantize_parts(WEIGHT, [("m", 64)], recipe, 64, None, torch.float32)
    stored = BitsAndBytesWriter(recipe, 64).tensors(made)
    sizes = [t.nbytes for name, t in stored.items() if name.endswith(("weight", "absmax"))]
    assert 8 * sum(sizes) / WEIGHT.numel() == pytest.approx(bits, abs=0.001)
    assert {"m.weight", "m.weight.absmax"} <= stored.keys()
    big, eight = preset("llama-3.1-70b"), preset("llama-3.1-8b")
    assert (ch13.file_bytes(big, 4.5) - ch13.file_bytes(big, 4.127)) / 1e9 == pytest.approx(
        3.19, abs=0.005
    )
    saved = 1 - ch13.file_bytes(eight, bits) / ch13.file_bytes(eight, 16)
    assert round(100 * saved) == {4.5: 62, 4.127: 64}[bits]


def test_claim_j4():
    config = preset("llama-3.1-8b")
    saved = 1 - ch13.file_bytes(config, 8) / ch13.file_bytes(config, 16)
    assert round(100 * saved) == 43
    recipe = Recipe("int8")
    (made,) = quantize_parts(WEIGHT, [("m", 64)], recipe, 512, None, torch.float32)
    stored = BitsAndBytesWriter(recipe, 512).tensors(made)
    sizes = {name: each.nbytes for name, each in stored.items()}
    assert sizes.pop("m.weight_format") == 1
    assert sizes == {"m.weight": WEIGHT.numel(), "m.SCB": 4 * len(WEIGHT)}  # half, and row scales


def test_claim_j5():
    """The sizes are those of the public package, and every type is decoded on a CPU."""
    sizes = pytest.importorskip("gguf").GGML_QUANT_SIZES
    for number, each in TYPES.items():
        assert sizes[number] == (each.weights, each.bytes), each.name
        if each.is_plain:
            continue
        found = DECODERS[each.name](torch.zeros(2, 3, each.bytes, dtype=torch.uint8)).dense()
        assert found.shape == (2, 3 * each.weights)
        assert found.device.type == "cpu"
    low, high = ch13.gguf_bits()
    assert (low, high) == (2.625, 8.5)


# Products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bf16", "int8", "int4"])
def test_a_layer_computes_with_the_rounded_weight(how):
    x = torch.randn(3, 512, generator=GENERATOR).bfloat16()
    first, made = ch13.layers(WEIGHT, how, 2)
    assert first.num_bytes == made.num_bytes
    with torch.inference_mode():
        found, exact = made(x).float(), x.float() @ WEIGHT.T
    error = float((found - exact).norm() / exact.norm())
    assert error < {"bf16": 0.01, "int8": 0.02, "int4": 0.15}[how]
    bits = 8 * made.num_bytes / WEIGHT.numel()
    assert bits == pytest.approx({"bf16": 16, "int8": 8.06, "int4": 4.19}[how], abs=0.02)


def test_products_are_timed(monkeypatch):
    monkeypatch.setenv("MINILLM_QUICK", "1")
    monkeypatch.setattr(ch13, "SIDE", 256)
    monkeypatch.setattr(ch13, "ROTATED", 2**18)
    made = ch13.products(["bf16", "int4"])
    assert len(made["int4"].layers) >= 2
    assert all(0 < each.seconds(2) < math.inf for each in made.values())
    assert ch13.bounds(made, 1e9)["bf16"] == 256 * 256 * 2 / 1e9
    assert ch13.bounds(made, 1e9, {"bf16": 1.0})["bf16"] == 256 * 256 * 2 / 1e9
    assert ch13.bounds(made, 1e9, {"bf16": 1e-6})["bf16"] == pytest.approx(1e-6)


# Pictures ------------------------------------------------------------------------------------


def test_pictures(captions):
    ch13_pictures.draw_points([0.0, 0.4, 15.0], 0.0, 1.0)
    assert "the largest error is 0.40 of a step" in captions[-1]
    ch13_pictures.draw_group(torch.linspace(0, 1, 16), -8.0, 7.0)
    assert "leaves 2 points to this group; with its own grid it uses 16." in captions[-1]
    even = torch.linspace(-1, 1, 16).tolist()
    ch13_pictures.draw_levels(torch.linspace(-1, 1, 100), {"odd": even, "even": even})
    assert "% with even" in captions[-1]
    formats = {name: Format(name, bits, lambda w: w) for name, bits in (("int2", 2.75), ("x", 4.0))}
    ch13_pictures.draw_quality(
        {formats["int2"]: Quality(1.2, 1, 1), formats["x"]: Quality(0.03, 1, 1)}, ["int2", "x"]
    )
    assert "each additional bit divides it by 40.0 to 40.0." in captions[-1]
    product = SimpleNamespace(num_bytes=1e6, layers=[SimpleNamespace(in_features=4096)])
    made = {"bf16": product, "int4": product}
    ch13_pictures.draw_products({"bf16": 2.0, "int4": 0.5}, {"bf16": 1.0, "int4": 0.3}, made)
    assert "it is 4.0 times as fast with int4." in captions[-1]
    times = {"bf16": {1: 2.0, 4: 2.0}, "int4": {1: 0.5, 4: 1.0}}
    ch13_pictures.draw_rows(times, {"int4": 4.19})
    assert "With 4 rows it is 2.0 for int4" in captions[-1]
