"""Deliberate mistakes in the AVX2 code of prefill attention, each of which a test must find."""

import pytest
import torch

from minillm.ops import c_library
from tests.ops import c_variants
from tests.ops import test_c_prefill as prefill
from tests.ops.test_c_mutants import build_with

PATH = "AVX2"
MUTANTS = {
    "the last rows of 32 are not multiplied": (r"r = whole; r < 32;", "r = whole; r < 28;"),
    "sums of the tiles before are dropped": (r"if \(add\)(\s+for \(int r)", r"if (0)\1"),
    "every row is the first": (r"all_lanes\(a\[r \* a_stride \+ j\]\)", "all_lanes(a[j])"),
    "a quarter is not exchanged": (
        r"a\[i \+ 2\] = SHUFFLE\(b\[i\], b\[i \+ 2\], 2, 3, 10, 11, 6, 7, 14, 15\)",
        "a[i + 2] = b[i + 2]",
    ),
}


def check(built: c_library.Library) -> None:
    """A prompt of several tiles, and a short one."""
    attend = prefill.Attend(built, torch.float32)
    attend.check(prefill.make_batch(torch.float32, [300, 9]))


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path):
    check(c_variants.built(PATH, "F32"))
    options = [*c_variants.PRODUCT_PATHS[PATH], "-DELEMENT_F32"]
    wrong = build_with(("prefill.c", "tiles.h", "transpose.h"), *MUTANTS[name], options, tmp_path)
    with pytest.raises(AssertionError):
        check(c_library.load(wrong))
