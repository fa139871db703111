"""Deliberate mistakes in `float8.c`, each of which a test of its products finds."""

import pytest
import torch

from minillm.ops import c_library
from tests.ops.test_c_mutants import build_with
from tests.quantization import test_float8_products as float8
from tests.quantization.test_quantized_c_mutants import AVX2, with_mistake

pytestmark = pytest.mark.slow
BF16 = torch.bfloat16
MUTANTS = {  # pattern, mistake, case of test_float8_products
    "input 2 for input 1": (r"to\[1\] = \(vec\)\(low & 0xffff0000\)", "to[1] = (vec)(high << 16)",
                               "blocks"),
    "no sign": (r"u >> 4 & \(int16_t\)0x87f0", "u >> 4 & (int16_t)0x07f0", "blocks"),
    "a mantissa of two bits": (r"u << 8 >> 4 & \(int16_t\)0x87f0", "u << 8 >> 4 & (int16_t)0x87e0",
                               "blocks"),
    "bias 8": (r"0x1p120f", "0x1p119f", "blocks"),
    "the scale of the first group": (r"groups \+ g\) \* PANEL", "groups) * PANEL", "blocks"),
    "the second piece of a group alone": (r"amx, part > 0\)", "amx, 0)", "a scale per row"),
    "a last piece that is too long": (r"w->group - part < SIDE \? w->group - part : SIDE", "SIDE",
                                      "groups of 96"),
    "rows of the first block": (r"x \+= now \* stride", "x += 0 * stride", "blocks"),
    "x of the first piece": (r"of_group, x \+ k,", "of_group, x,", "blocks"),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path, monkeypatch):
    pattern, mistake, case = MUTANTS[name]
    options, called = [*AVX2, "-DELEMENT_BF16"], ("quantized.c", "linear.c")
    file = build_with(("float8.c",), pattern, mistake, options, tmp_path, called)
    float8.test_products_equal_float64(case, BF16)
    with_mistake(monkeypatch, c_library.load(file))
    with pytest.raises(AssertionError):
        float8.test_products_equal_float64(case, BF16)
