"""Deliberate mistakes in `float8.c`, each of which a test of its products finds."""

import shutil

import pytest
import torch

from minillm.ops import c_library
from tests.quantization import test_float8_products as float8
from tests.quantization.test_quantized_c_mutants import AVX2, SOURCES, put, with_mistake

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
    shutil.copytree(c_library.SOURCES, tmp_path / "c")
    assert put(mistake, pattern, tmp_path / "c" / "float8.c") == 1
    command = [str(c_library.find_compiler()), *c_library.FLAGS, *c_library.for_this_cpu(), "-O1"]
    sources = [tmp_path / "c" / each for each in SOURCES]
    c_library.build([*command, *AVX2, "-DELEMENT_BF16"], sources, tmp_path / "mutant.so")
    float8.test_products_equal_float64(case, BF16)
    with_mistake(monkeypatch, c_library.load(tmp_path / "mutant.so"))
    with pytest.raises(AssertionError):
        float8.test_products_equal_float64(case, BF16)
