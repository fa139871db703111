"""Products with quantised weights in C, beside float64 with the same rounded activations."""

from dataclasses import replace

import pytest
import torch

from minillm.lab.quantise.grid import Grid, round_to_grid
from minillm.ops import c_library, cpu
from minillm.ops.cpu_quantized import MatrixParts, quantized_linear, whole_numbers
from minillm.quantization.panels import arranged
from minillm.quantization.quantized import Quantized, joined
from minillm.quantization.rounding import round_symmetric
from tests.ops import c_variants
from tests.ops.c_variants import PRODUCT_PATHS, with_threads
from tests.pairs import some

pytestmark = pytest.mark.skipif(
    cpu.functions(torch.bfloat16) is None, reason="there are no C functions for bf16"
)
BF16 = torch.bfloat16


GROUP = 32  # inputs that are rounded together


def rounded(x: torch.Tensor, order: torch.Tensor | None = None) -> torch.Tensor:
    """Each 32 inputs of rows [N, in], in the order of the weight's columns, rounded to 127 steps of
    their largest value, in float64."""
    groups = x.float()[:, order if order is not None else slice(None)].unflatten(1, (-1, GROUP))
    most = groups.abs().amax(2, keepdim=True)
    inverse = torch.full_like(most, 127) / most  # a scalar would be multiplied by the reciprocal
    found = ((groups * inverse).round().double() * (most / 127).double()).flatten(1)
    return found if order is None else found[:, order.argsort()]


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """Every other row with some channels that are a hundred times larger, as in real models."""
    x[::2, 5::100] *= 100
    return x


def round_asymmetric(weight: torch.Tensor, bits: int, group: int, scales=torch.float16):
    return round_to_grid(weight, Grid(bits, False, scales), group)


def with_minima(weight: torch.Tensor, scales: torch.dtype) -> Quantized:
    """Unsigned 4-bit codes times a scale, plus the minimum, as GGUF's Q4_1 and Q4_K."""
    found = round_asymmetric(weight, 4, 32, scales)
    minima = (-found.zeros.float() * found.scales.float()).to(scales)
    return replace(found, zeros=None, minima=minima)


def in_table(weight: torch.Tensor, table: torch.Tensor, group: int = 64) -> Quantized:
    """The nearest entries of a table, times the largest absolute value of a group."""
    grouped = weight.unflatten(1, (-1, group))
    scales = grouped.abs().amax(-1) / table.abs().max()
    entries = grouped / scales[..., None]
    codes = (entries[..., None] - table).abs().argmin(-1).flatten(1)
    return Quantized(joined(codes), scales, table=table)


def in_order(weight: torch.Tensor) -> Quantized:
    """Columns in another order, as GPTQ's act order leaves them."""
    order = torch.randperm(weight.shape[1])
    return replace(round_asymmetric(weight[:, order], 4, 32), order=order)


def with_whole_numbers(quantised: Quantized) -> Quantized:
    """The table as C has it, rounded to multiples of a unit."""
    if quantised.table is None:
        return quantised
    numbers, unit = whole_numbers(quantised.table)
    return replace(quantised, table=(numbers.float() - 128) * unit)


NF4 = torch.tensor([
    -1.0, -0.6961928, -0.5250730, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
    0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
])  # fmt: skip  # QLoRA (Dettmers et al., 2023), appendix E
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CASES = {
    "int8, a scale per row": lambda w: round_symmetric(w),
    "int8, groups of 32": lambda w: round_symmetric(w, 8, 32, torch.float16),
    "int8, zero points": lambda w: round_asymmetric(w, 8, 64, BF16),
    "int4, groups of 32": lambda w: round_symmetric(w, 4, 32, torch.float16),
    "int4, zero points": lambda w: round_asymmetric(w, 4, 64, BF16),
    "int4, a zero point per row": lambda w: round_asymmetric(w, 4, -1, torch.float32),
    "int8, groups of 80": lambda w: round_symmetric(w, 8, 80, torch.float16),
    "int8, groups of 16": lambda w: round_symmetric(w, 8, 16, torch.float16),
    "int4, groups of 16": lambda w: round_asymmetric(w, 4, 16, torch.float16),
    "int4, minima": lambda w: with_minima(w, torch.float32),
    "int4, minima in float16": lambda w: with_minima(w, torch.float16),
    "NF4": lambda w: in_table(w, NF4),
    "FP4": lambda w: in_table(w, E2M1, 32),
    "FP4, groups of 16": lambda w: in_table(w, E2M1, 16),
    "act order": in_order,
}


PATHS = some(["native"], PRODUCT_PATHS)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 17, 40, 70])
def test_products_equal_float64(name, rows):
    torch.manual_seed(rows)
    x, bias = with_outliers(torch.randn(rows, 1600)).to(BF16), torch.randn(75).to(BF16)
    quantised = CASES[name](torch.randn(75, 1600) + 0.3)
    found = quantized_linear(x, arranged(quantised), bias, 75).double()
    weight = with_whole_numbers(quantised).dense().double()
    due = rounded(x, quantised.order) @ weight.T + bias.double()
    most = due.abs().amax(1, keepdim=True)
    assert ((found - due).abs() <= 2**-8 * most).all()  # of rounding y to bf16


@pytest.mark.parametrize("name", CASES)
def test_inputs_that_are_rounded_twice_have_16_bits(name):
    """Beside the product with x itself; the bits of a row are the same in every batch."""
    torch.manual_seed(2)
    x, bias = with_outliers(torch.randn(40, 1600)).to(BF16), torch.randn(75).to(BF16)
    quantised = CASES[name](torch.randn(75, 1600) + 0.3)
    parts = replace(arranged(quantised), twice=True)
    found = quantized_linear(x, parts, bias, 75)
    due = x.double() @ with_whole_numbers(quantised).dense().double().T + bias.double()
    most = due.abs().amax(1, keepdim=True)
    assert ((found.double() - due).abs() <= 2**-8 * 1.05 * most).all()
    for start, stop in ((0, 1), (3, 5), (15, 17), (39, 40)):
        assert torch.equal(quantized_linear(x[start:stop], parts, bias, 75), found[start:stop])


def test_numbers_that_are_not_finite_stay_so_in_their_row():
    weight, x = arranged(round_symmetric(torch.randn(32, 64))), torch.randn(3, 64).to(BF16)
    x[0, 5], x[2, 63] = float("nan"), float("inf")
    found = quantized_linear(x, weight, None, 32)
    assert found[[0, 2]].isnan().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", PATHS)
def test_an_output_depends_on_its_row_only(path, name, monkeypatch):
    use_functions(c_variants.built(path, "BF16"), monkeypatch)
    check_bits(name, BF16)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", [each for each in c_variants.PATHS if each != "native"])
def test_every_instruction_set_has_the_same_bits(path, name, monkeypatch):
    torch.manual_seed(3)
    x, weight = with_outliers(torch.randn(17, 320)).to(BF16), CASES[name](torch.randn(75, 320))
    parts = arranged(weight), replace(arranged(weight), twice=True)
    due = [quantized_linear(x, each, None, 75) for each in parts]
    use_functions(c_variants.built(path, "BF16"), monkeypatch)
    for each, wanted in zip(parts, due, strict=True):
        assert torch.equal(quantized_linear(x, each, None, 75), wanted)


def use_functions(found: c_library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute with these functions, on one thread."""
    monkeypatch.setattr(cpu, "functions", lambda dtype: found)
    monkeypatch.setattr(found.threads, "follow_torch", lambda: None)
    found.threads.set(1)


def check_bits(name: str, dtype: torch.dtype) -> None:
    """Of a case."""
    torch.manual_seed(0)
    x = torch.randn(128, 320).to(dtype)
    check_rows(x, arranged(CASES[name](torch.randn(75, 320))))


def check_rows(x: torch.Tensor, weight: MatrixParts) -> None:
    """The bits of a row are the same in every batch, and with 1, 2 and 3 threads."""
    whole = quantized_linear(x, weight, None, 75)
    for start, stop in ((0, 1), (0, 16), (0, 17), (3, 5), (7, 20), (127, 128)):
        assert torch.equal(quantized_linear(x[start:stop], weight, None, 75), whole[start:stop])
    for threads in (2, 3):
        with with_threads(cpu.functions(x.dtype), threads):
            for stop in (1, 17, 128):
                assert torch.equal(quantized_linear(x[:stop], weight, None, 75), whole[:stop])
