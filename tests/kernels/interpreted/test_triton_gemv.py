"""Products of few rows, with and without a norm before them: interpreted, against float64."""

from pathlib import Path

import pytest
import torch

from minillm_kernels import gemv, reference
from minillm_kernels.check import gemv as check
from minillm_kernels.check.case import generator
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError
from tests.kernels.interpreted.conftest import programs_in
from tests.kernels.mutants import convicted, mutant

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{what} encountered in")  # numpy says it, a GPU does not
    for what in ("divide by zero", "invalid value", "overflow")
]
BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize("norm", [False, True])
def test_a_row_has_the_same_bits_for_every_number_of_rows(dtype: torch.dtype, norm: bool) -> None:
    rng = generator(3)
    x, norm_weight = torch.randn(40, 72, generator=rng), torch.randn(72, generator=rng)
    weight, bias = torch.randn(24, 72, generator=rng), torch.randn(24, generator=rng)
    x, norm_weight, weight, bias = (t.to(dtype) for t in (x, norm_weight, weight, bias))
    config = gemv.Config(16, 32, splits=2)  # of 64 and 8 columns

    def run(rows: slice) -> torch.Tensor:
        options = {"config": config, "batch_invariant": True}
        if norm:
            return gemv.norm_linear(x[rows], None, norm_weight, 1e-6, weight, bias, **options)[0]
        return gemv.linear(x[rows], weight, bias, **options)

    with ordered_dots():
        together = run(slice(0, 40))
        for rows in (slice(0, 1), slice(15, 16), slice(3, 5), slice(2, 21)):
            assert torch.equal(run(rows), together[rows])


def test_one_row_is_invariant_only_if_asked() -> None:
    rng = generator(4)
    x, weight = torch.randn(2, 999, generator=rng), torch.randn(40, 999, generator=rng)
    with ordered_dots():
        both = gemv.linear(x, weight)
        assert torch.equal(gemv.linear(x[:1], weight, batch_invariant=True), both[:1])
        assert not torch.equal(gemv.linear(x[:1], weight), both[:1])  # another arithmetic


@pytest.mark.parametrize("splits", [1, 2])
def test_the_rows_of_a_result_may_be_wider(splits: int) -> None:
    rng = generator(6)
    x, weight = torch.randn(3, 80, generator=rng), torch.randn(20, 80, generator=rng)
    options = {"config": gemv.Config(16, 16, splits=splits)}
    wide = torch.full((3, 29), -1.0)
    gemv.linear(x, weight, out=wide[:, 4:24], **options)
    assert torch.equal(wide[:, 4:24], gemv.linear(x, weight, **options))
    assert bool((wide[:, :4] == -1).all() and (wide[:, 24:] == -1).all())


@pytest.mark.parametrize("rows", [5, 20])
def test_bits_do_not_depend_on_who_is_last(rows: int, another_order) -> None:
    rng = generator(8)
    x, weight = torch.randn(rows, 200, generator=rng), torch.randn(40, 200, generator=rng)
    given = x, x, x[0], 1e-6, weight
    options = {"config": gemv.Config(16, 16, splits=4)}
    with ordered_dots():
        usual, normed = gemv.linear(x, weight, **options), gemv.norm_linear(*given, **options)[0]
        with another_order:
            assert torch.equal(gemv.linear(x, weight, **options), usual)
            assert torch.equal(gemv.norm_linear(*given, **options)[0], normed)


def test_tiles_of_rows_in_another_order(another_order) -> None:
    with another_order:
        for case in TALL:
            check.verify(case)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_of_nothing_is_its_bias(rows: int) -> None:
    bias = torch.arange(5.0)
    assert torch.equal(
        gemv.linear(torch.ones(rows, 0), torch.ones(5, 0), bias), bias.expand(rows, 5)
    )


def test_a_bad_row_hurts_no_other() -> None:
    rng = generator(5)
    x, weight = torch.randn(4, 96, generator=rng), torch.randn(20, 96, generator=rng)
    fine = gemv.norm_linear(x, None, torch.ones(96), 1e-6, weight)[0]
    x[2] = torch.nan
    spoilt = gemv.norm_linear(x, None, torch.ones(96), 1e-6, weight)[0]
    assert bool(spoilt[2].isnan().all())
    assert torch.equal(spoilt[[0, 1, 3]], fine[[0, 1, 3]])


@pytest.mark.parametrize("dtype", check.DTYPES)
@pytest.mark.parametrize(("rows", "splits"), [(1, 1), (5, 1), (5, 3), (20, 3)])
def test_fused_rows_have_the_bits_of_separate_launches(dtype, rows: int, splits: int) -> None:
    """The norm apart: it rounds what it stores."""
    rng = generator(7)
    x, residual = (torch.randn(rows, 96, generator=rng).to(dtype) for _ in range(2))
    weight, norm = torch.randn(52, 96, generator=rng).to(dtype), torch.ones(96, dtype=dtype)
    options = {"config": gemv.Config(16, 32, splits=splits)}
    with ordered_dots():
        before = x + residual, torch.zeros_like(x)
        plain, same = gemv.norm_linear(*before, norm, 1e-6, weight, **options)
        gated, total = gemv.norm_linear(x, residual, norm, 1e-6, weight, gated=True, **options)
    assert torch.equal(total, same)
    close = 0 if dtype == BF16 else 1e-6  # numpy's exp
    torch.testing.assert_close(gated, reference.silu_mul(plain), rtol=close, atol=close)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_a_norm_inside_rounds_no_more_than_one_before(dtype: torch.dtype) -> None:
    """Root mean squares of the errors beside float64: of a norm that is rounded once and multiplied
    exactly, and of the kernel."""
    rng = generator(9)
    x = torch.randn(20, 600, generator=rng) * 2.0 ** (torch.arange(20) / 2)[:, None]
    norm, weight = torch.randn(600, generator=rng), torch.randn(64, 600, generator=rng)
    x, norm, weight = (each.to(dtype) for each in (x, norm, weight))
    exact = reference.rms_norm(x.double(), norm.double(), 1e-6)
    inside = gemv.norm_linear(x, None, norm, 1e-6, weight)[0]
    apart = (exact.to(dtype).double() @ weight.T.double()).to(dtype)
    exact = exact @ weight.T.double()
    errors = [float((each - exact).square().mean().sqrt()) for each in (inside, apart)]
    assert errors[0] < 1.05 * errors[1], errors


# ---- configurations ----------------------------------------------------------------------------


def config(rows: int, num_out: int, size: int, dtype: torch.dtype = BF16) -> gemv.Config:
    """Of an H200."""
    return gemv.config_for(rows, num_out, size, dtype, 90, 132)


@pytest.mark.parametrize(
    ("num_out", "rows"), [(4096, 8), (28672, 8), (2560, 4), (1024, 2), (512, 1), (128, 1), (1, 1)]
)
def test_one_row_fills_the_chip_with_programs(num_out: int, rows: int) -> None:
    found = config(1, num_out, 4096)
    assert (found.block_out, found.splits) == (rows, 1)


@pytest.mark.parametrize("num_out", [4096, 28672])
@pytest.mark.parametrize("rows", [16, 32, 64, 256])
def test_a_tile_fits_into_shared_memory(rows: int, num_out: int) -> None:
    """Of an RTX 4090; x and the residual arrive there, too, and their norm is put there. With as
    many programs as it has places, none is idle and none waits for a second wave."""
    for dtype in check.DTYPES:
        found = config(rows, num_out, 4096, dtype)
        numbers = (found.num_stages - 1) * (found.block_out + 2 * found.block_rows)
        assert (numbers + found.block_rows) * found.block_in * dtype.itemsize <= 101_376
        tiles = -(-num_out // found.block_out) * -(-rows // found.block_rows)
        assert found.splits == 1 or 132 <= tiles * found.splits <= 264


def test_x_is_read_seldom_where_that_leaves_enough_programs() -> None:
    assert [config(64, *shape).block_out for shape in ((28672, 4096), (6144, 1024))] == [128, 64]


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x, w: gemv.linear(x[0], w), "x is [16]; it must be [M, in]."),
        (lambda x, w: gemv.linear(x, w[:, :8]), "weight is [4, 8]; it must be [out, 16]."),
        (lambda x, w: gemv.linear(x, w.half()), "x is torch.float32 and weight torch.float16"),
        (lambda x, w: gemv.linear(x.int(), w), "x is torch.int32; it must be float32 or float16"),
        (lambda x, w: gemv.linear(x, x.view(16, 2).T), "weight has strides (1, 2)"),
        (lambda x, w: gemv.linear(x.view(16, 2).T, w), "x has strides (1, 2)"),
        (lambda x, w: gemv.linear(x, w, w), "bias is [4, 16]; it must be [4]."),
        (lambda x, w: gemv.linear(x, w, w[:, 0]), "bias has shape [4] and strides (16,)"),
        (lambda x, w: gemv.linear(x, w, out=w), "out is [4, 16]; it must be [2, 4]."),
        (lambda x, w: gemv.linear(x, w.to("meta")), "x is on cpu and weight on meta"),
        (lambda x, w: gemv.norm_linear(x, None, w[0, :8], 0.0, w), "norm_weight is [8]; it must"),
        (lambda x, w: gemv.norm_linear(x, None, w[0].to(BF16), 0.0, w), "and norm_weight torch.b"),
        (lambda x, w: gemv.norm_linear(x, None, w.view(64)[::4], 0.0, w), "norm_weight has shape"),
        (lambda x, w: gemv.norm_linear(x, x[:1], w[0], 0.0, w), "residual is [1, 16]; it must be"),
        (lambda x, w: gemv.norm_linear(x, x.half(), w[0], 0.0, w), "and residual torch.float16"),
        (lambda x, w: gemv.norm_linear(x, None, w[0], 0.0, w[:3], gated=True), "gate and up must"),
    ],
)
def test_bad_input_is_one_sentence(call: object, sentence: str) -> None:
    with pytest.raises(KernelError) as error:
        call(torch.ones(2, 16), torch.ones(4, 16))  # type: ignore[operator]
    assert sentence in str(error.value)


# ---- mutations ---------------------------------------------------------------------------------

ONE = tuple(case for case in check.CASES if case.rows == 1)
SPLIT = tuple(case for case in check.CASES if case.tile)
MANY = tuple(case for case in check.CASES if case.rows != 1)
TALL = tuple(case for case in check.CASES if case.rows > 16)
HALF = tuple(case for case in MANY if case.dtype == torch.float16)
ADDED = tuple(case for case in check.CASES if case.residual)
GATED = tuple(case for case in check.CASES if case.gated)
BUGS = [
    (ONE, "the last columns forgotten", "tl.range(0, SIZE, BLOCK_IN,",
     "tl.range(0, SIZE - SIZE % BLOCK_IN, BLOCK_IN,"),
    (ONE, "unguarded columns", "        inside = column < SIZE\n",
     "        inside = column < SIZE + BLOCK_IN\n"),
    (MANY, "unguarded columns of several rows", "inside = (column < SIZE)[None, :]",
     "inside = (column >= 0)[None, :]"),
    (ONE, "unguarded rows of the weight", "mask = here[:, None] & inside[None, :]",
     "mask = (out >= 0)[:, None] & inside[None, :]"),
    (MANY, "unguarded rows of x", "live = (row < num_rows)[:, None]",
     "live = (row >= 0)[:, None]"),
    (MANY, "unguarded rows of y", "mask = here[:, None] & (row < stored)[None, :]",
     "mask = here[:, None] & (row >= 0)[None, :]"),
    (ONE, "the bias forgotten", "total += tl.load(bias_ptr + out,",
     "total += 0.0 * tl.load(bias_ptr + out,"),
    (SPLIT, "the last split added twice", "total = tl.zeros_like(total)", "total = total + 0.0"),
    (SPLIT, "counters left at the number of splits", "tl.store(arrivals_ptr + tile, 0)",
     "tl.store(arrivals_ptr + tile, SPLITS)"),
    (ONE, "no eps with one row", "tl.sum(squares) / SIZE + eps", "tl.sum(squares) / SIZE"),
    (ONE, "a mean over the padded width", "tl.sum(squares) / SIZE",
     "tl.sum(squares) / BLOCK_IN"),
    (MANY, "the norm of all rows", "tl.rsqrt(squares / SIZE + eps)[None, :]",
     "tl.rsqrt(tl.sum(squares) / SIZE + eps)"),
    (MANY, "no eps with several rows", "tl.rsqrt(squares / SIZE + eps)",
     "tl.rsqrt(squares / SIZE)"),
    (SPLIT, "the norm of one split", "squares += tl.load(place", "squares = tl.load(place"),
    (SPLIT, "a mean over the columns of a split", "squares / SIZE", "squares / (SIZE // SPLITS)"),
    (SPLIT, "squares beside the wrong split", "tl.store(row_parts + split * step",
     "tl.store(row_parts + 0 * step"),
    (MANY, "no weight of the norm", "wide *= norm_weight.to(tl.float32)[None, :]", "wide *= 1.0"),
    (TALL, "one tile of rows", "row = tl.program_id(0) * ROWS + tl.arange", "row = tl.arange"),
    (TALL, "a counter for several tiles of rows",
     "tile = tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)", "tile = tl.program_id(0)"),
    (TALL, "gate and up of another tile", "out = block * half", "out = tile * half"),
    (TALL, "a sum of the first rows only", "tl.where(block == 0, num_rows, 0)",
     "tl.where(block == 0, tl.minimum(num_rows, ROWS), 0)"),
    (ADDED, "a sum of the second program", "tl.where(block == 0, num", "tl.where(block == 1, num"),
    (TALL, "squares in the next row's part", "width = num_out + 16", "width = num_out"),
    (ONE, "the norm of weighted numbers", "            squares += x * x\n            x *=",
     "            x *="),
    (SPLIT, "splits from the beginning", "begin = tl.program_id(2) * SPLIT", "begin = 0"),
    (SPLIT, "the last split forgotten", "tl.static_range(SPLITS)",
     "tl.static_range(SPLITS - 1)"),
    (SPLIT, "parts of splits that overlap", "step = num_rows.to(tl.int64) * width",
     "step = width.to(tl.int64)"),
    (ADDED, "the norm of x alone", "x = added.to(tl.float32)\n        if norm",
     "x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)\n        if norm"),
    (ADDED, "a sum of the last program", "tl.where(tile == 0,", "tl.where(tile == 1,"),
    (GATED, "gate and up apart", "place // 2 + place % 2 * (num_out // 2) if", "place if"),
    (GATED, "up and gate", "gate, up = tl.split", "up, gate = tl.split"),
    (HALF, "an unscaled product in half precision", "tl.max(tl.abs(wide), axis=1)",
     "tl.min(tl.abs(wide * 0), axis=1) + 1"),
    (HALF, "the scale of the last tile", "total += tl.dot(weight, tl.trans(x)) * largest[None, :]",
     "total = (total + tl.dot(weight, tl.trans(x))) * largest[None, :]"),
]  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize(("cases", "bug", "old", "new"), BUGS, ids=[bug[1] for bug in BUGS])
def test_a_bug_is_found(
    cases: tuple[check.Case, ...], bug: str, old: str, new: str, tmp_path: Path
) -> None:
    broken = mutant(gemv, old, new, tmp_path)
    found = convicted(check.verify, cases, broken)
    with programs_in("by splits"):
        assert found or convicted(check.verify, cases, broken)
