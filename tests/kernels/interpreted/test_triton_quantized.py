"""Products with quantised weights: interpreted, against float64."""

from pathlib import Path

import pytest
import torch

from minillm_kernels import gemv, quantized
from minillm_kernels import quantized_reference as reference
from minillm_kernels.check import quantized as check
from minillm_kernels.check.case import generator
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError
from tests.kernels.mutants import convicted, mutant

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in")  # numpy says it, a GPU does not
    for what in ("divide by zero", "invalid value", "overflow")
]
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


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


# ---- rows do not depend on each other ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_a_row_alone_has_the_same_bits(kind: str) -> None:
    with ordered_dots():
        for case in check.CASES:
            if case.kind == kind and 1 < case.rows < 32 and case.size <= 300:
                check.verify_invariant(case)


# ---- configurations ----------------------------------------------------------------------------


def config(rows: int, num_out: int, size: int, **options: bool) -> quantized.Config:
    """Of an H200."""
    return quantized.choose_config(rows, num_out, size, 128, 90, 132, **options)


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
        block = quantized.block_in_of(group)
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
    ],
)
def test_bad_input_is_one_sentence(call: object, sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        call()  # type: ignore[operator]


# ---- mutations ---------------------------------------------------------------------------------

BUGS = [
    ("int4", "nibbles swapped", "_numbers(packed & 15,", "_numbers(packed >> 4,"),
    ("int4", "halves of the wrong columns", "low_rows + start + 16", "low_rows + start + 1"),
    ("int4", "pairs in neighbouring columns", "byte // 16 * 32 + byte % 16", "byte * 2"),
    ("int4", "the scale of the next group", "number = start // GROUP * num_out + out",
     "number = (start + GROUP) % SIZE // GROUP * num_out + out"),
    ("int4", "the scale by column", "start // GROUP * num_out + out",
     "start // GROUP + out * (SIZE // GROUP)"),
    ("int4", "zero points dropped", "if zeros_ptr is not None:", "if False:"),
    ("int4", "unsigned zero points", "other=0).to(tl.float32)\n        low",
     "other=0).to(tl.uint8, bitcast=True).to(tl.float32)\n        low"),
    ("int4", "minima dropped", "if minima_ptr is not None:", "if False:"),
    ("int4", "minima of half of the sum", "low_x.to(tl.float32) + high_x.to(tl.float32)",
     "low_x.to(tl.float32)"),
    ("int4", "another exponent", "| 0x4300", "| 0x4380"),
    ("int4", "the bias of float16", "(zero + 1024.0)", "(zero + 128.0)"),
    ("int4", "splits from the beginning", "begin = tl.program_id(2) * SPLIT", "begin = 0"),
    ("int4", "rows that do not exist", "live = (row < num_rows)[:, None]",
     "live = (row >= 0)[:, None]"),
    ("int4", "outputs that do not exist", "here = out < num_out\n    live",
     "here = out >= 0\n    live"),
    ("e4m3", "scales by row of the weight", "out // SCALE_ROWS\n            scale",
     "out % num_scales\n            scale"),
    ("e4m3", "the scale of the next block", "start // SCALE_COLUMNS * num_scales",
     "(start // SCALE_COLUMNS + 1) % tl.cdiv(SIZE, SCALE_COLUMNS) * num_scales"),
    ("e4m3", "the sign of bfloat16 in place", "(wide & 0x80) << 8) | ((wide & 0x7F) << 4",
     "(wide & 0x80) << 7) | ((wide & 0x7F) << 4"),
    ("e4m3", "the exponent bias of float16", "* 256.0", "* 128.0"),
    ("e4m3", "the last columns unguarded", "inside = (column < SIZE)[None, :]",
     "inside = (column >= 0)[None, :]"),
    ("e4m3", "channels scaled twice", "    if channels:\n        scale",
     "    if True:\n        scale"),
    ("int8", "the last columns forgotten", "SIZE), BLOCK_IN):\n        column",
     "SIZE - SIZE % BLOCK_IN), BLOCK_IN):\n        column"),
    ("int8", "the last split lost", "tl.static_range(SPLITS)", "tl.static_range(SPLITS - 1)"),
    ("int8", "codes as e4m3", "if INTEGERS else", "if False else"),
]  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize(("kind", "bug", "old", "new"), BUGS, ids=[each[1] for each in BUGS])
def test_a_bug_is_found(kind: str, bug: str, old: str, new: str, tmp_path: Path) -> None:
    cases = [case for case in check.CASES if case.kind == kind]
    assert convicted(check.verify, cases, mutant([quantized, gemv], old, new, tmp_path))
