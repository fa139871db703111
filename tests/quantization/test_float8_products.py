"""Products with FP8 weights in C (`float8.c`), beside float64 with the same codes."""

import pytest
import torch

from minillm.lab.quantise.fp8 import round_fp8
from minillm.ops.cpu_quantized import quantized_linear
from minillm.quantization.panels import arranged
from minillm.quantization.quantized import Quantized
from tests.ops import c_variants
from tests.ops.c_variants import ELEMENTS, PRODUCT_PATHS
from tests.quantization.test_quantized_products import check_rows, use_functions

QUICK = ("native", "baseline")
CELLS = [
    pytest.param((path, element), marks=() if path in QUICK else pytest.mark.slow)
    for path in PRODUCT_PATHS
    for element in ELEMENTS
]
FLOAT8 = torch.float8_e4m3fn
CODES = torch.arange(256, dtype=torch.uint8).view(FLOAT8)
ROUNDING = {torch.bfloat16: 2**-8, torch.float32: 2**-16}  # of y; sums of 1,600 float32 products


@pytest.fixture(params=CELLS, ids=lambda cell: " ".join(cell))
def dtype(request, monkeypatch) -> torch.dtype:
    """The type of activations, with the functions of one instruction set."""
    path, element = request.param
    use_functions(c_variants.built(path, element), monkeypatch)
    return ELEMENTS[element]


def weights(blocks: bool = False, scales: torch.dtype = torch.float32) -> Quantized:
    """75 outputs, 1,600 or 1,536 inputs."""
    torch.manual_seed(7)
    return round_fp8(torch.randn(75, 1536 if blocks else 1600) + 0.3, scales, blocks)


def of_groups(size: int) -> Quantized:
    """Groups of another size than the pieces that C decodes at a time."""
    torch.manual_seed(size)
    values = torch.randn(75, 480 // size, size)
    scales = values.abs().amax(-1) / 448
    return Quantized((values / scales[..., None]).to(FLOAT8).flatten(1), scales)


CASES = {
    "a scale per row": lambda: weights(),
    "scales in bf16": lambda: weights(scales=torch.bfloat16),
    "blocks": lambda: weights(blocks=True),
    "groups of 32": lambda: of_groups(32),
    "groups of 96": lambda: of_groups(96),
    "groups of 160": lambda: of_groups(160),
}


@pytest.mark.parametrize("name", CASES)
def test_products_equal_float64(name, dtype):
    quantised, bias = CASES[name](), torch.randn(75).to(dtype)
    for rows in (1, 2, 3, 7, 8, 9, 17, 40, 70):
        x = torch.randn(rows, quantised.shape[1]).to(dtype)
        found = quantized_linear(x, arranged(quantised), bias, 75).double()
        due = x.double() @ quantised.dense().double().T + bias.double()
        assert (found - due).abs().max() <= ROUNDING[dtype] * due.abs().max()


@pytest.mark.parametrize("rows", [1, 3])
def test_every_code_is_decoded_exactly(rows, dtype):
    """Each input selects one code: there is nothing to round. Subnormal numbers are included."""
    codes = torch.stack([torch.roll(CODES.view(torch.uint8), i) for i in range(256)])
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).view(FLOAT8)  # NaN: below
    weight = arranged(Quantized(codes, torch.ones(256, 1)))
    for start in range(0, 256, rows):
        x = torch.eye(256, dtype=dtype)[start : start + rows]
        found = quantized_linear(x, weight, None, 256)
        assert torch.equal(found.float(), codes.float().T[start : start + rows])


def test_nan_stays_in_its_row_of_the_weight_or_of_x(dtype):
    quantised = weights(blocks=True)
    quantised.codes[3, 700], quantised.codes[70, 5] = float("nan"), -float("nan")
    x = torch.randn(20, 1536).to(dtype)
    x[6, 1500], x[7, 0] = float("nan"), float("inf")
    found = quantized_linear(x, arranged(quantised), None, 75)
    assert found[:, [3, 70]].isnan().all()
    assert found[6].isnan().all()
    assert not found[7].isfinite().any()
    found[:, [3, 70]] = found[[6, 7]] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("name", ["a scale per row", "blocks", "groups of 96"])
def test_an_output_depends_on_its_row_only(name, dtype):
    quantised = CASES[name]()
    check_rows(torch.randn(128, quantised.shape[1]).to(dtype), arranged(quantised))


def test_an_outlier_among_small_activations(dtype):
    """Activations are not rounded to 8 bits: small ones count beside one of 10,000."""
    quantised, x = weights(), torch.randn(2, 1600).to(dtype)
    quantised.codes[:, 11] = 0
    alone = quantized_linear(x, arranged(quantised), None, 75)
    x[:, 11] = 1e4
    assert torch.equal(quantized_linear(x, arranged(quantised), None, 75), alone)
