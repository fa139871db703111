"""Products with quantised weights in C, beside float64 with the same rounded activations."""

import pytest
import torch

from minillm.ops import cpu
from minillm.ops.cpu_quantized import fits, packed_matrix, quantized_linear
from minillm.quantization.integers import split_bytes
from minillm.quantization.rounding import round_asymmetric, round_symmetric

pytestmark = pytest.mark.skipif(
    cpu.functions(torch.bfloat16) is None, reason="there are no C functions for bf16"
)
BF16 = torch.bfloat16


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows [N, in] rounded to 127 steps of their largest value, in float64."""
    x = x.float()
    inverse = 127 / x.abs().amax(1, keepdim=True)
    step = x.abs().amax(1, keepdim=True) / 127
    return (x * inverse).round().double() * step.double()


def packed(quantised):
    """A `Quantized` as C reads it."""
    if quantised.bits == 4:
        codes = split_bytes(quantised.codes)
    else:
        codes = (quantised.codes.to(torch.int16) + 128).to(torch.uint8)
    parts = quantised.scales, quantised.zeros, quantised.minima
    return packed_matrix(codes, quantised.bits, *parts)


CASES = {
    "int8, a scale per row": lambda w: round_symmetric(w),
    "int8, groups of 32": lambda w: round_symmetric(w, 8, 32, torch.float16),
    "int8, zero points": lambda w: round_asymmetric(w, 8, 64, BF16),
    "int4, groups of 32": lambda w: round_symmetric(w, 4, 32, torch.float16),
    "int4, zero points": lambda w: round_asymmetric(w, 4, 64, BF16),
    "int4, a zero point per row": lambda w: round_asymmetric(w, 4, -1, torch.float32),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 17, 40, 70])
def test_products_equal_float64(name, rows):
    torch.manual_seed(rows)
    x, bias = torch.randn(rows, 1600).to(BF16), torch.randn(75).to(BF16)
    quantised = CASES[name](torch.randn(75, 1600) + 0.3)
    assert fits(*quantised.shape, quantised.group_size, quantised.bits)
    found = quantized_linear(x, packed(quantised), bias, 75).double()
    due = rounded(x) @ quantised.dense().double().T + bias.double()
    assert (found - due).abs().max() <= 2**-8 * due.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_an_output_depends_on_its_row_only(name):
    torch.manual_seed(0)
    x, weight = torch.randn(33, 320).to(BF16), packed(CASES[name](torch.randn(64, 320)))
    whole = quantized_linear(x, weight, None, 64)
    for start, stop in ((0, 1), (3, 5), (7, 20), (32, 33)):
        assert torch.equal(quantized_linear(x[start:stop], weight, None, 64), whole[start:stop])


def test_a_row_of_zeros_gives_the_bias():
    weight = packed(round_asymmetric(torch.randn(32, 64), 4, 32))
    bias = torch.randn(32).to(BF16)
    assert torch.equal(quantized_linear(torch.zeros(2, 64, dtype=BF16), weight, bias, 32)[1], bias)
