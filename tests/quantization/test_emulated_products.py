"""Products with quantised weights on instruction sets that this processor may not have: AVX-512,
VNNI, BF16 and AMX by SIMDe, NEON by qemu.

Where x, scales and sums are numbers that float32 has exactly, int8, int4 and tables must have the
bits of this processor. In general only the contraction of sums and products may differ.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from minillm.ops import c_library, cpu
from minillm.ops.cpu_quantized import quantized_linear
from minillm.quantization.panels import arranged
from minillm.quantization.quantized import Quantized
from tests.ops import c_variants, emulated
from tests.ops.c_variants import ELEMENTS, EMULATED_PATHS
from tests.quantization import test_float8_products as float8
from tests.quantization import test_quantized_products as products

pytestmark = pytest.mark.slow
ROWS = (1, 2, 3, 7, 8, 9, 17, 33)
CELLS = [(name, each) for name in (*EMULATED_PATHS, *emulated.MACHINES) for each in ELEMENTS]


@dataclass(frozen=True)
class Emulated:
    """The functions of an instruction set for one element type."""

    functions: c_library.Library
    element: c_library.Element

    @property
    def dtype(self) -> torch.dtype:
        return ELEMENTS[self.element]


@pytest.fixture(scope="module", params=CELLS, ids=" ".join)
def built(request, tmp_path_factory) -> Iterator[tuple[Emulated, emulated.Emulated | None]]:
    """The library of one machine."""
    name, element = request.param
    if name in EMULATED_PATHS:
        yield Emulated(c_variants.emulated(name, element), element), None
        return
    machine = emulated.MACHINES[name]
    program = emulated.build(machine, element, tmp_path_factory.mktemp("emulated"))
    library = emulated.Emulated(program, machine)
    yield Emulated(library, element), library
    library.close()


@pytest.fixture
def there(built) -> Iterator[Emulated]:
    """The same, with the memory of this test."""
    found, library = built
    if library is None:
        yield found
    else:
        with library.memory.recorded():
            yield found


def test_the_instructions_are_those_that_are_named(there, request):
    """`panel_unit` of linear.c, from the same macros."""
    name, element = request.node.callspec.params["built"]
    units = {"AVX-512": 2, "AVX-512 with VNNI": 2, "AVX-512 with VNNI and BF16": 3, "AMX": 4}
    units |= {"neon_bf16": 5}
    plain = {2: 2, 3: 2, 4: 2, 5: 0}
    due = units.get(name, 0)
    assert there.functions.panel_unit() == (due if element == "BF16" else plain.get(due, 0))


def exact(quantised: Quantized) -> Quantized:
    """The same codes with scales that are powers of two, and minima that are multiples of them."""
    scales = quantised.scales.float().log2().round().clamp(-9, -5).exp2()
    minima = quantised.minima
    if minima is not None:
        minima = (minima.float() * 64).round().clamp(-64, 64) / 64
        minima = minima.to(quantised.minima.dtype)
    return replace(quantised, scales=scales.to(quantised.scales.dtype), minima=minima)


@pytest.mark.parametrize("name", products.CASES)
def test_integer_products_have_the_bits_of_this_processor(name, there, monkeypatch):
    torch.manual_seed(3)
    weight = arranged(exact(products.CASES[name](torch.randn(75, 320) + 0.3)))
    for rows in ROWS:
        x = torch.randint(-127, 128, (rows, 320)).to(there.dtype)
        x[:, rows % 7 :: 32] = 127  # in each group, so that rounded x is x
        due = quantized_linear(x, weight, None, 75)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "functions", lambda dtype: there.functions)
            assert torch.equal(quantized_linear(x, weight, None, 75), due)


@pytest.mark.parametrize("name", products.CASES)
def test_products_of_any_numbers(name, there, monkeypatch):
    torch.manual_seed(4)
    weight = arranged(products.CASES[name](torch.randn(75, 320) + 0.3))
    bias = torch.randn(75).to(there.dtype)
    for rows in ROWS:
        x = inputs(rows, 320, there.dtype)
        due = quantized_linear(x, weight, bias, 75)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "functions", lambda dtype: there.functions)
            found = quantized_linear(x, weight, bias, 75)
        most = due.abs().amax(1, keepdim=True).float()
        assert ((found.float() - due.float()).abs() <= float8.ROUNDING[there.dtype] * most).all()


def inputs(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of activations, one of them large."""
    torch.manual_seed(rows)
    x = torch.randn(rows, width)
    x[-1] *= 1000
    return x.to(dtype)


@pytest.mark.parametrize("name", ["int8, a scale per row", "int4, zero points", "NF4"])
def test_bits_do_not_depend_on_the_batch_or_the_threads(name, there, monkeypatch):
    products.use_functions(there.functions, monkeypatch)
    products.check_bits(name, there.dtype)


@pytest.mark.parametrize("name", float8.CASES)
def test_fp8_products(name, there, monkeypatch):
    quantised, bias = float8.CASES[name](), torch.randn(75).to(there.dtype)
    weight = arranged(quantised)
    for rows in ROWS:
        x = inputs(rows, quantised.shape[1], there.dtype)
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "functions", lambda dtype: there.functions)
            found = quantized_linear(x, weight, bias, 75)
        due = x.double() @ quantised.dense().double().T + bias.double()
        bound = float8.ROUNDING[there.dtype] * due.abs().amax(1, keepdim=True)
        assert ((found.double() - due).abs() <= bound).all()


def test_fp8_codes_and_nan(there, monkeypatch):
    products.use_functions(there.functions, monkeypatch)
    dtype = there.dtype
    float8.test_every_code_is_decoded_exactly(3, dtype)
    float8.test_nan_stays_in_its_row_of_the_weight_or_of_x(dtype)
    for name in ("blocks", "groups of 96"):
        float8.test_an_output_depends_on_its_row_only(name, dtype)
