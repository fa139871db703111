"""Products with quantised weights: interpreted, against float64."""

import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError

from minillm_kernels import int4_linear, int8_linear, quantized, quantized_config, scaled_linear
from minillm_kernels import quantized_reference as reference
from minillm_kernels.bench import quantized as bench
from minillm_kernels.check import quantized as check
from minillm_kernels.check.case import Mismatch, generator
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError
from tests.kernels.mutants import mutant

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in")  # numpy says it, a GPU does not
    for what in ("divide by zero", "invalid value", "overflow")
]
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
KINDS = ("int4", "int8", "e4m3", "int8 blocks", "e4m3 rows", "round")


@pytest.mark.parametrize("kind", KINDS)
def test_every_case(kind: str) -> None:
    cases = [case for case in check.CASES if case.kind == kind]
    assert len(cases) >= 3
    for case in cases:
        check.verify(case)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_any_case(seed: int) -> None:
    check.verify(check.random_case(random.Random(seed)))


# ---- formats against what others compute -------------------------------------------------------


def test_the_order_of_codes_is_that_of_q4_0() -> None:
    """gguf's own quantiser: a block is a scale of 2 bytes, then 16 bytes of codes."""
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(6, 64, generator=generator(1)).numpy()
    packed = gguf.quants.quantize(weight, gguf.GGMLQuantizationType.Q4_0)
    blocks = torch.from_numpy(packed.copy()).view(6, 2, 18)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(-1).T.contiguous()
    codes = blocks[..., 2:].reshape(6, 32).contiguous()
    zeros = torch.full(scales.shape, 8, dtype=torch.int8)
    got = quantized.int4_linear(torch.eye(64), codes, scales, zeros).T
    due = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q4_0)
    assert torch.equal(got, torch.from_numpy(due))


def test_interleaving_can_be_undone() -> None:
    codes = torch.randint(0, 16, (5, 96), generator=generator(2)).to(torch.uint8)
    assert torch.equal(reference.deinterleave(reference.interleave(codes)), codes)


@pytest.mark.parametrize("dtype", check.DTYPES)
def test_every_e4m3_number_is_decoded_exactly(dtype: torch.dtype) -> None:
    every = torch.arange(256).to(torch.uint8).view(E4M3)
    every = every[~every.float().isnan()]
    codes = torch.zeros(len(every), 32).to(E4M3)
    codes[:, 0] = every
    one = torch.eye(1, 32, dtype=dtype)
    got = quantized.scaled_linear(one, codes, torch.ones(1, len(every)), block=(1, 32))
    assert torch.equal(got[0].float(), every.float())


def test_rows_are_rounded_as_torch_rounds() -> None:
    """Ties, subnormal numbers and the largest: at scale 1 a code is torch's cast."""
    every = torch.arange(127).to(torch.uint8).view(E4M3).float()
    between = (every[1:] + every[:-1]) / 2
    near = torch.cat([every, between, between * (1 + 2**-20), between * (1 - 2**-20)])
    x = torch.cat([near, -near])[None]
    codes, scales = quantized.quantize_rows(x, E4M3)
    assert scales.tolist() == [1.0]
    assert torch.equal(codes.view(torch.uint8), x.to(E4M3).view(torch.uint8))
    x = torch.cat([torch.arange(-254, 255) / 2, torch.tensor([127.0])])[None]
    codes, scales = quantized.quantize_rows(x)
    assert scales.tolist() == [1.0]
    assert torch.equal(codes.float(), x.round())


# ---- rows do not depend on each other ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", "e4m3", "e4m3 rows"])
def test_a_row_alone_has_the_same_bits(kind: str) -> None:
    with ordered_dots():
        for case in check.CASES:
            if case.kind == kind and 1 < case.rows < 32 and case.size <= 300:
                check.verify_invariant(case)


def test_int8_rows_have_the_same_bits_with_any_tile() -> None:
    case = check.Case("int8", 21, 50, 300, torch.float32, bias=True)
    check.verify_invariant(case)  # BLAS's order of sums does not matter: they are integers
    name, arguments, _ = check.inputs(case, "cpu")
    run = getattr(quantized, name)
    usual = run(**arguments)
    for tile in ((16, 16, 32), (64, 32, 64)):
        for splits in (1, 2, 7):
            config = quantized.Config(*tile, splits=splits)
            assert torch.equal(run(**arguments, config=config), usual)


@pytest.mark.parametrize("kind", [torch.int8, E4M3])
def test_a_bad_row_hurts_no_other(kind: torch.dtype) -> None:
    x = torch.randn(4, 96, generator=generator(5))
    codes = torch.randn(20, 96, generator=generator(6)).mul(9).to(kind)
    x[2, 7] = torch.inf
    rows, scales = quantized.quantize_rows(x, kind)
    if kind == torch.int8:
        out = quantized.int8_linear(rows, scales, codes, torch.ones(20))
    else:
        out = quantized.scaled_linear(
            rows, codes, torch.ones(1, 20), block=(1, 96), x_scales=scales
        )
    assert bool(out[2].isnan().all())
    assert bool(out[[0, 1, 3]].isfinite().all())


# ---- configurations ----------------------------------------------------------------------------


def config(rows: int, num_out: int, size: int, **options: bool) -> quantized.Config:
    """Of an H200."""
    return quantized_config.choose_config(rows, num_out, size, 128, 90, 132, **options)


def test_few_rows_fill_the_chip_and_many_use_large_tiles() -> None:
    one, many = config(1, 4096, 14336), config(2048, 4096, 14336)
    assert (one.block_rows, one.splits) == (16, 4)
    assert (many.block_out, many.block_rows, many.splits) == (128, 128, 1)
    assert config(1, 512, 256).splits == 1  # a shorter split would not fill its pipeline


def test_the_invariant_mode_does_not_see_the_number_of_rows() -> None:
    found = {config(rows, 4096, 4096, batch_invariant=True) for rows in (1, 7, 16, 90, 4000)}
    assert len(found) == 1


def test_a_tile_lies_within_a_group() -> None:
    for group in (32, 64, 96, 128, 160, 256, 576):
        block = quantized_config.block_in_of(group)
        assert group % block == 0
        assert block >= 32


# ---- bad input ---------------------------------------------------------------------------------


def four(x: torch.Tensor, **changes: object) -> object:
    arguments: dict[str, object] = {"codes": torch.zeros(8, 32, dtype=torch.uint8)}
    arguments |= {"scales": torch.ones(2, 8)} | changes
    return quantized.int4_linear(x, **arguments)  # type: ignore[arg-type]


def eight(x: torch.Tensor, **changes: object) -> object:
    arguments: dict[str, object] = {"codes": torch.zeros(8, 64, dtype=torch.int8)}
    arguments |= {"scales": torch.ones(2, 8), "block": (1, 32)} | changes
    return quantized.scaled_linear(x, **arguments)  # type: ignore[arg-type]


X = torch.ones(3, 64)
ZEROS = torch.zeros(2, 8, dtype=torch.int8)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: four(X.int()), "x is torch.int32; it must be float32 or float16 or bfloat16."),
        (lambda: four(X[:, :40]), "a group has 20 columns; it must have a multiple of 32."),
        (lambda: four(X[:, :63]), "x has 63 columns, which 2 groups cannot share evenly."),
        (lambda: four(X, scales=torch.ones(8, 2)), "x has 64 columns, but|a group has 8 columns"),
        (lambda: four(X, codes=torch.zeros(8, 32)), "codes is torch.float32; it must be uint8."),
        (lambda: four(X, zeros=ZEROS, minima=torch.ones(2, 8)), "zeros and minima are both given"),
        (lambda: four(X, zeros=torch.ones(2, 8)), "zeros is torch.float32; it must be int8."),
        (lambda: four(X, zeros=ZEROS.T), r"zeros is \[8, 2\]; it must be \[2, 8\]."),
        (lambda: four(X.T.contiguous().T), "x has strides"),
        (lambda: four(X, bias=torch.ones(3)), r"bias is \[3\]; it must be \[8\]."),
        (lambda: eight(X, block=(1, 48)), "a block of scales has 48 columns"),
        (lambda: eight(X, block=(0, 32)), r"block is \(0, 32\); it must be"),
        (lambda: eight(X, block=(4, 32)), r"scales is \[2, 8\]; it must be \[2, 2\]."),
        (lambda: eight(X, x_scales=torch.ones(3)), "x is torch.float32; it must be float8_e4m3fn"),
        (lambda: quantized.quantize_rows(X, torch.int16), "the dtype of codes is torch.int16"),
        (
            lambda: quantized.int8_linear(X, X[:, 0], ZEROS, X[0]),
            "x_codes is torch.float32; it must be int8.",
        ),
        (
            lambda: quantized.int8_linear(
                torch.zeros(1, 140_000, dtype=torch.int8), torch.ones(1), ZEROS, X[0]
            ),
            "above 133144 a sum could exceed int32",
        ),
    ],
)
def test_bad_input_is_one_sentence(call: object, sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        call()  # type: ignore[operator]


# ---- mutations ---------------------------------------------------------------------------------

INT4 = (int4_linear, "int4")
INT8 = (int8_linear, "int8")
ROUND = (int8_linear, "round")
E4M3_W = (scaled_linear, "e4m3")
E4M3_ROWS = (scaled_linear, "e4m3 rows")
INT8_BLOCKS = (scaled_linear, "int8 blocks")
BUGS = [
    (INT4, "nibbles swapped", "_numbers(packed & 15,", "_numbers(packed >> 4,"),
    (INT4, "halves of the wrong columns", "low_rows + start + 16", "low_rows + start + 1"),
    (INT4, "pairs in neighbouring columns", "byte // 16 * 32 + byte % 16", "byte * 2"),
    (INT4, "the scale of the next group", "number = start // GROUP * num_out + out",
     "number = (start + GROUP) % SIZE // GROUP * num_out + out"),
    (INT4, "the scale by column", "start // GROUP * num_out + out",
     "start // GROUP + out * (SIZE // GROUP)"),
    (INT4, "zero points dropped", "if zeros_ptr is not None:", "if False:"),
    (INT4, "unsigned zero points", "other=0).to(tl.float32)\n        low",
     "other=0).to(tl.uint8, bitcast=True).to(tl.float32)\n        low"),
    (INT4, "minima dropped", "if minima_ptr is not None:", "if False:"),
    (INT4, "minima of half of the sum", "low_x.to(tl.float32) + high_x.to(tl.float32)",
     "low_x.to(tl.float32)"),
    (INT4, "another exponent", "| 0x4300", "| 0x4380"),
    (INT4, "the bias of float16", "(zero + 1024.0)", "(zero + 128.0)"),
    (INT4, "splits from the beginning", "begin = tl.program_id(2) * SPLIT", "begin = 0"),
    (INT4, "splits to the end", "tl.minimum(begin + SPLIT, SIZE)", "SIZE"),
    (INT4, "sums of splits lost", "place += row", "place = out_ptr + row"),
    (INT4, "the bias with every split", "None if grid.num_splits > 1 else bias, target)",
     "bias, target)"),
    (INT4, "rows that do not exist", "live = (row < num_rows)[:, None]",
     "live = (row >= 0)[:, None]"),
    (INT4, "outputs that do not exist", "here = out < num_out", "here = out >= 0"),
    (INT8, "the last columns unguarded", "inside = (column < SIZE)[None, :]",
     "inside = (column >= 0)[None, :]"),
    (INT8, "the last columns forgotten", "tl.minimum(begin + SPLIT, SIZE), BLOCK_IN",
     "tl.minimum(begin + SPLIT, SIZE - SIZE % BLOCK_IN), BLOCK_IN"),
    (INT8, "a row's scale by column", "x_scale[None, :], scale[:, None]",
     "tl.sum(x_scale), scale[:, None]"),
    (INT8, "a row's scale by column, in splits", "x_scales_ptr + row, mask=mask",
     "x_scales_ptr + column % (num_numbers // num_out), mask=mask"),
    (INT8, "the last split lost", "tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)"),
    (INT8, "the bias lost in splits",
     "    if bias_ptr is not None:\n        bias += tl.load(bias_ptr + column",
     "    if False:\n        bias += tl.load(bias_ptr + column"),
    (ROUND, "truncated", "((number + 12582912.0) - 12582912.0)", "number"),
    (ROUND, "half away from zero", "size + 0x7FFFF + ((size >> 20) & 1)", "size + 0x80000"),
    (ROUND, "subnormal numbers as normal ones", "tl.where(size < 0x3C800000, small, normal)",
     "normal"),
    (ROUND, "the sign lost", "code | ((bits >> 24) & 0x80)", "code"),
    (ROUND, "NaN that vanishes", " + tl.sum(wrong)", ""),
    (ROUND, "a row of zeros divided by zero", "tl.maximum(number, -most), most), 0.0)",
     "tl.maximum(number, -most), most), number)"),
    (E4M3_W, "scales by row of the weight", "out // SCALE_ROWS\n            scale",
     "out % num_scales\n            scale"),
    (E4M3_W, "the scale of the next block", "start // SCALE_COLUMNS * num_scales",
     "(start // SCALE_COLUMNS + 1) % tl.cdiv(SIZE, SCALE_COLUMNS) * num_scales"),
    (E4M3_W, "the sign of bfloat16 in place", "(wide & 0x80) << 8) | ((wide & 0x7F) << 4",
     "(wide & 0x80) << 7) | ((wide & 0x7F) << 4"),
    (E4M3_W, "the exponent bias of float16", "* 256.0", "* 128.0"),
    (E4M3_W, "the last columns unguarded", "inside = (column < SIZE)[None, :]",
     "inside = (column >= 0)[None, :]"),
    (E4M3_W, "channels scaled twice", "    if channels:\n        scale",
     "    if True:\n        scale"),
    (E4M3_W, "sums of splits lost", "place += row", "place = out_ptr + row"),
    (E4M3_ROWS, "rows not scaled", "    if x_scales_ptr is not None:\n        total",
     "    if False:\n        total"),
    (E4M3_ROWS, "rows scaled by column", "other=0.0)[None, :]\n    if bias",
     "other=0.0)[:, None]\n    if bias"),
    (INT8_BLOCKS, "codes as e4m3", "elif INTEGERS:", "elif False:"),
]  # fmt: skip


def convicted(broken: ModuleType, kind: str) -> bool:
    """Whether a case shows the bug, by a wrong result or a wrong access."""
    for case in check.CASES:
        if case.kind != kind:
            continue
        try:
            check.verify(case, kernels=broken)
        except Mismatch:
            return True
        except InterpreterError as error:
            if "OutOfBoundsError" not in str(error) and "shape" not in str(error):
                raise
            return True
    return False


@pytest.mark.mutation
@pytest.mark.parametrize(("where", "bug", "old", "new"), BUGS, ids=[each[1] for each in BUGS])
def test_a_bug_is_found(
    where: tuple[ModuleType, str], bug: str, old: str, new: str, tmp_path: Path
) -> None:
    module, kind = where
    assert convicted(mutant(module, old, new, tmp_path), kind)


def test_the_benchmark_runs() -> None:
    for measurement in bench.measurements(tiny=True):
        expected = measurement.peers["torch"](1)
        error = torch.linalg.vector_norm(measurement.run(1) - expected)
        assert error < 0.05 * torch.linalg.vector_norm(expected)  # e4m3 rounds by up to 1/16
        assert measurement.num_bytes > 0
