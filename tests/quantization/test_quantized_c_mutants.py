"""Deliberate mistakes in `quantized.c`, each of which a test of products finds."""

import re
import shutil
from dataclasses import replace

import pytest

from minillm.ops import c_library, cpu
from tests.ops import c_variants
from tests.quantization import test_quantized_products as products

AVX2 = ("-march=x86-64-v3", "-mprefer-vector-width=256")
SOURCES = ("quantized.c", "linear.c", "threads.c")
MUTANTS = {  # pattern, mistake, case of test_quantized_products, flags
    "halves of a byte swapped": (r"\(u\[s\] >> 4\) & low", "u[s] & low", "int4, zero points", ()),
    "inputs of the high half": (r"four\(at \+ 16\)", "four(at + 4)", "int4, groups of 32", ()),
    "zero point 7": (r"EXACT \? 8 : 0", "EXACT ? 7 : 0", "int4, groups of 32", ()),
    "codes are signed": (r"SIGNED \? 0 : 128", "0", "int8, groups of 32", ()),
    "scale of the first group": (
        r"groups \+ g\) \* PANEL", "groups) * PANEL", "int4, zero points", ()
    ),
    "sum of the first group": (
        r"\(float\)p->sums\[\(row \+ r\) \* groups \+ g\]",
        "(float)p->sums[(row + r) * groups]",
        "int4, zero points",
        (),
    ),
    "zero point without scale": (r"offset \*= scale;", ";", "int4, zero points", ()),
    "factor of the first row": (r"p->t\[row \+ r\]", "p->t[row]", "int8, a scale per row", ()),
    "the second part is left out": (
        r"part < group;", "part < 1;", "int4, a zero point per row", ()
    ),
    "offset for each part": (
        r"if \(first && w->offset", "if (w->offset", "int4, a zero point per row", ()
    ),
    "sign of the code is lost": (
        r"_mm256_sign_epi8\(x, code\)", "x", "int8, groups of 32", AVX2
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name, tmp_path, monkeypatch):
    pattern, mistake, case, flags = MUTANTS[name]
    shutil.copytree(c_library.SOURCES, tmp_path / "c")
    file = tmp_path / "c" / "quantized.c"
    text, count = re.subn(pattern, mistake, file.read_text())
    assert count == 1, f"{pattern} is there {count} times"
    file.write_text(text)
    command = [str(c_library.find_compiler()), *c_library.FLAGS, *c_library.for_this_cpu(), "-O1"]
    sources = [tmp_path / "c" / each for each in SOURCES]
    c_library.build([*command, *flags, "-DELEMENT_BF16"], sources, tmp_path / "mutant.so")
    products.test_products_equal_float64(case, 9)
    with_mistake(monkeypatch, c_library.load(tmp_path / "mutant.so"))
    with pytest.raises(AssertionError):
        products.test_products_equal_float64(case, 9)


def with_mistake(monkeypatch: pytest.MonkeyPatch, built: c_library.Library) -> None:
    """Compute products with another library, which has only these."""
    right = c_variants.functions("native", "BF16")
    wrong = built.quantized_product
    wrong.restype, wrong.argtypes = (
        right.quantized_product.restype,
        right.quantized_product.argtypes,
    )
    changed = replace(right, quantized_product=wrong, threads=c_library.Threads(built))
    monkeypatch.setattr(cpu, "functions", lambda dtype: changed)
