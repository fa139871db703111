"""Chapter 13's own functions: formats against published dequantisers, quality, bytes, products."""

import numpy as np
import pytest
import torch

from minillm.lab.roofline import step_cost
from minillm.models.presets import preset
from minillm.plan.cost import weight_bytes
from minillm_exercises.chapters import ch13
from minillm_exercises.chapters.quality import Subject

GENERATOR = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(64, 512, generator=GENERATOR)


@pytest.fixture(scope="module")
def tiny() -> Subject:
    return Subject()


def test_q4_0_is_that_of_the_public_package():
    quants = pytest.importorskip("gguf.quants")
    kind = pytest.importorskip("gguf").GGMLQuantizationType.Q4_0
    theirs = quants.dequantize(quants.quantize(WEIGHT.numpy(), kind), kind)
    assert np.array_equal(ch13.q4_0(WEIGHT).numpy(), theirs)


def test_q4_k_has_the_error_that_is_known_for_normal_weights():
    """About 0.07 of the weights with searched grids, a little more without."""
    error = (ch13.q4_k(WEIGHT) - WEIGHT).norm() / WEIGHT.norm()
    assert 0.07 < error < 0.085
    assert not ch13.q4_k(torch.zeros(2, 256)).any()


@pytest.mark.slow
def test_kl_is_the_mean_over_positions(tiny):
    """Against torch's own, with other weights in one matrix."""
    name = "6.down_proj"
    other = {**tiny.weights, name: 0.9 * tiny.weights[name]}
    with tiny.changed(other):
        dists = torch.cat(tiny._dists())
    own = torch.cat(tiny._own)
    want = torch.nn.functional.kl_div(dists, own, log_target=True, reduction="batchmean")
    found = tiny.judge(lambda at, weight: other[at])
    assert found.kl == pytest.approx(float(want), rel=1e-4)


def test_bytes_in_16_bits_are_those_of_the_cost_model():
    for name in ("smollm2-135m", "llama-3.1-8b"):
        config = preset(name)
        cost = step_cost(config, [1], [1], dtype="bfloat16").weight_bytes
        assert ch13.step_bytes(config, 16, 16) == pytest.approx(cost, rel=1e-3)  # but for norms
        assert ch13.file_bytes(config, 16) == pytest.approx(weight_bytes(config), rel=1e-3)


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


def test_fp8_is_exact_at_powers_of_two_and_at_the_largest():
    row = torch.tensor([[448.0, 2.0, -0.25, 17.0]])
    assert ch13.fp8(row).tolist() == [[448.0, 2.0, -0.25, 16.0]]  # 17 is between 16 and 18


def test_an_unchanged_model_is_no_distance_away(tiny):
    found = tiny.judge(lambda name, weight: weight)
    assert found.kl == 0
    assert found.same == 1
    assert 1.0 < found.bits < 1.5


def test_inputs_multiply_to_what_the_model_computes(tiny):
    inputs = tiny.inputs(600)
    assert {name: tuple(x.shape) for name, x in inputs.items() if name[0] == "0"} == {
        "0.qkv_proj": (600, 256),
        "0.o_proj": (600, 256),
        "0.gate_up_proj": (600, 256),
        "0.down_proj": (600, 768),
    }
    late = tiny.inputs(88, start=512)["3.qkv_proj"]  # the second window
    assert torch.allclose(late, inputs["3.qkv_proj"][512:], atol=1e-5)
    gate, up = (inputs["3.gate_up_proj"] @ tiny.weights["3.gate_up_proj"].T).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    assert torch.allclose(inputs["3.down_proj"], want, rtol=1e-4, atol=1e-5)
