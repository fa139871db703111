"""Deliberate mistakes in `quantized.c`, each of which a test of products finds."""

import pytest

from minillm.ops import c_library, cpu, instruction_sets
from tests.ops import c_variants
from tests.ops.test_c_mutants import build_with
from tests.quantization import test_quantized_products as products

AVX2 = c_variants.PATHS["AVX2"]
BASELINE = c_variants.PRODUCT_PATHS["baseline"]
TILES = c_variants.PRODUCT_PATHS["tiles in C"]
TWICE = "int8, a scale per row, rounded twice"
MISTAKEN = ("quantized.c", "integers.h")
MUTANTS = {  # pattern, mistake, case of test_quantized_products, flags
    "halves of a byte swapped": (
        r"v\[c\] = high_halves\(both\)", "v[c] = low_halves(both)", "int4, zero points", ()
    ),
    "inputs of the high half": (
        r"second = four\(q \+ r \* in \+ i \+ 16\)",
        "second = four(q + r * in + i + 4)",
        "int4, groups of 32",
        (),
    ),
    "inputs of the high half of a table": (r"i \+ 16 \* half", "i + 4 * half", "NF4", ()),
    "one half of a table's codes": (r"half \? high_halves\(both\) :", "", "NF4", ()),
    "the unit of a table is left out": (r" \* c->w->unit", "", "NF4", ()),
    "the order of inputs is left out": (
        r"load\(x\[order\[k \+ i\]\]\)", "load(x[k + i])", "act order", ()
    ),
    "minima with a zero point's sign": (
        r"offset = scales_at", "offset = -scales_at", "int4, minima", ()
    ),
    "zero point 7": (r"EXACT \? 8 : 0", "EXACT ? 7 : 0", "int4, groups of 32", ()),
    "codes are signed": (r"SIGNED \? 0 : 128", "SIGNED ? 128 : 0", "int8, groups of 32", ()),
    "scale of the first group": (
        r"groups \+ at->group\) \* PANEL", "groups) * PANEL", "int4, zero points", ()
    ),
    "sum of the first group": (
        r"at->groups \+ at->group;", "at->groups;", "int4, zero points", ()
    ),
    "zero point without scale": (
        r"-s \* zeros_at", "-zeros_at", "int4, zero points", ()
    ),
    "scales of the first row of x": (
        r"t\[r \* parts\]\);\n        }", "t[0]);\n        }", "int8, a scale per row", ()
    ),
    "scale of x of another group": (
        r"parts \+ \(k >> 5\)", "parts + (at->k >> 5)", "int8, a scale per row", ()
    ),
    "sum of x of another group": (
        r"steps \+ \(k >> shift\)", "steps + (at->k >> shift)", "int8, a scale per row",
        BASELINE,  # where codes are unsigned
    ),
    "one scale for a row of x": (
        r"(?=float inverse = )",
        "static _Thread_local float kept; most = kept = most > kept ? most : kept; ",
        "int4, groups of 32",
        (),
    ),
    "a step across groups": (
        r"group % ROUNDED \? LEAST_GROUP : ROUNDED", "ROUNDED", "int8, groups of 80", ()
    ),
    "totals without the scales of x": (
        r"\(double\)to\.t\[i / ROUNDED\] \*", "(double)", "int4, minima", ()
    ),
    "the second part is left out": (
        r"part < group;", "part < 1;", "int4, a zero point per row", ()
    ),
    "offset for each part": (
        r"if \(at->is_first && w->offset", "if (w->offset", "int4, a zero point per row", ()
    ),
    "the rest is not what remains": (
        r"some\[i\] -= \(float\)\(\(double\)t", "some[i] -= (float)((double)t / 2", TWICE, ()
    ),
    "planes of other rows are added": (r"i / PANEL \* 2 \*", "i / PANEL *", TWICE, ()),
    "sign of the code is lost": (
        r"_mm256_sign_epi8\(\(__m256i\)q, \(__m256i\)code\)",
        "(__m256i)q",
        "int8, groups of 32",
        AVX2,
    ),
    "tiles: halves of a byte swapped": (
        r"bytes \+ 64 \* i, &low", "bytes + 64 * i, &high", "int4, minima", TILES
    ),
    "tiles: inputs of the high half": (
        r"bytes \+ 64 \* \(i \+ 4\)", "bytes + 64 * (7 - i)", "int4, groups of 32", TILES
    ),
    "tiles: codes of a table as they are": (
        r"if \(numbers\) low", "if (0) low", "NF4", TILES
    ),
    "tiles: codes of the step before": (
        r"codes \+ \(i \+ 1\) \* size", "codes + i * size", "int4, groups of 32", TILES
    ),
    "tiles: the second tile of A": (
        r"_tile_loadd\(4, q \+ i \* ROUNDED", "_tile_loadd(4, q", "int8, groups of 32", TILES
    ),
    "tiles: sums of the step after": (
        r"acc\[\(i - 1\) & 1\]", "acc[i & 1]", "int8, groups of 32", TILES
    ),
    "tiles: one scale of x": (
        r"found \* t\[r \* parts\]", "found * t[0]", "int4, groups of 32", TILES
    ),
    "tiles: one scale of x in long groups": (
        r"t\[r \* parts\]\);\n                if", "t[0]);\n                if",
        "int8, a scale per row", TILES
    ),
    "tiles: scale of the first group": (
        r"scale \+= PANEL", "scale += 0", "int4, groups of 32", TILES
    ),
    "tiles: a group's total is the first one": (
        r", of_groups\+\+", "", "int4, minima", TILES
    ),
    "tiles: offset for each part": (
        r"last && before < LONGEST", "last", "int4, a zero point per row", TILES
    ),
    "tiles: a part is added twice": (
        r", some\[r\] = \(vec\)\{0\}", "", "int8, zero points", TILES
    ),
    "tiles: steps of 16 inputs": (
        r"w->group % ROUNDED \|\| ", "", "int8, groups of 80", TILES
    ),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path, monkeypatch):
    pattern, mistake, case, flags = MUTANTS[name]
    if flags:
        c_variants.skip_without_instructions("tiles in C" if flags is TILES else "AVX2")
    elif (instruction_sets.chosen() or instruction_sets.OTHER).name == "amx":
        flags = c_variants.NO_TILES  # these mistakes are in the code for vectors
    options, called = [*flags, "-DELEMENT_BF16"], ("float8.c", "linear.c")
    file = build_with(MISTAKEN, pattern, mistake, options, tmp_path, called)
    rows = 9 + 8 * (flags is TILES)
    check(case, rows)
    with_mistake(monkeypatch, c_library.load(file))
    with pytest.raises(AssertionError):
        check(case, rows)


def check(case: str, rows: int) -> None:
    """Products of a case."""
    if case == TWICE:
        products.test_inputs_that_are_rounded_twice_have_16_bits(case.rpartition(",")[0])
    else:
        products.test_products_equal_float64(case, rows)


def with_mistake(monkeypatch: pytest.MonkeyPatch, built: c_library.Library) -> None:
    """Compute products with another library, which has only these."""
    right = c_variants.built("native", "BF16")
    changed = c_variants.Mixed(right, "quantized_product", built)
    monkeypatch.setattr(cpu, "functions", lambda dtype: changed)
