"""`flash_attention` interpreted: every case against float64, bits alone and in a batch, bad input,
and deliberate bugs that `verify` must find."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels.mutants import mutant

from minillm_kernels import flash_attention, flash_attention_config
from minillm_kernels.bench.flash_attention import measurements
from minillm_kernels.check.case import Mismatch
from minillm_kernels.check.flash_attention import (
    BF16,
    CASES,
    DESCRIBED,
    F16,
    POINTERS,
    SPECIALISED,
    Case,
    inputs_of,
    random_case,
    verify,
    verify_invariant,
)
from minillm_kernels.flash_attention_config import choose_config, describable, kv_heads_at_once
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError

# A sequence of NaN has no largest score, and tanh of 1e4 divides by an infinite exponential.
pytestmark = [
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_case(case: Case) -> None:
    verify(case)


@settings(max_examples=10, derandomize=True, deadline=None)
@given(st.integers(0, 10**6))
def test_any_call(seed: int) -> None:
    verify(random_case(random.Random(seed)))


def test_more_sequences_than_one_step_of_the_search(tmp_path: Path) -> None:
    narrow = mutant(
        flash_attention, "SEARCH = tl.constexpr(256)", "SEARCH = tl.constexpr(2)", tmp_path
    )
    verify(Case(((5, 5), (0, 3), (2, 2), (1, 9), (0, 0), (3, 3)), 1, 1), kernels=narrow)


# ---- batch invariance ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(((5, 5), (33, 37), (1, 20)), 1, 1, config=POINTERS),
        Case(((5, 5), (17, 37), (1, 40)), 1, 1, dtype=BF16, window=20, config=DESCRIBED, bad=0),
        Case(((5, 5), (33, 37)), 1, 1, dtype=F16, causal=False, config=SPECIALISED),
        Case(((5, 5), (40, 50), (3, 3)), 2, 1),
    ],
    ids=["pointers", "descriptors", "specialised", "launcher's choice"],
)
def test_bits_of_a_sequence_are_its_own(case: Case) -> None:
    with ordered_dots():
        verify_invariant(case)


@pytest.mark.mutation
def test_tiles_of_another_size_have_other_bits(tmp_path: Path) -> None:
    old = "config.block_m, config.block_n,"
    new = "config.block_m, config.block_n * (1 + (num_sequences > 1)),"
    case = Case(((5, 5), (33, 37)), 1, 1, config=POINTERS)
    broken = mutant(flash_attention, old, new, tmp_path)
    verify(case, kernels=broken)
    with ordered_dots(), pytest.raises(Mismatch, match="other bits"):
        verify_invariant(case, kernels=broken)


# ---- configurations ------------------------------------------------------------------------------


def test_every_head_dim_has_tiles() -> None:
    for target in (80, 86, 89, 90, 100, 120):
        for head_dim in range(8, 257, 8):
            for dtype in (torch.float32, F16, BF16):
                for bulk_copies in (True, False):
                    half = dtype != torch.float32
                    config = choose_config(target, dtype, head_dim, head_dim, bulk_copies and half)
                    described = half and bulk_copies and target in (90, 100)
                    assert config.descriptors == described
                    assert config.warp_specialize == (described and target == 90)


def test_what_bulk_copies_take() -> None:
    whole = torch.zeros(4, 2, 24, dtype=F16)
    assert describable(whole, whole[1:], whole[..., :8])
    assert not describable(whole, whole.float())
    assert not describable(whole[:0])
    assert not describable(whole[..., 4:12]), "begins 8 bytes from a multiple of 16"
    assert not describable(torch.zeros(4, 2, 20, dtype=F16)[..., :16]), "strides of 40 bytes"


@pytest.mark.parametrize(
    ("num_kv_heads", "megabytes", "expected"),
    [(8, 1, 8), (8, 4, 8), (8, 5, 4), (8, 100, 1), (6, 8, 3), (7, 8, 1), (1, 0, 1)],
)
def test_kv_heads_that_share_the_cache(num_kv_heads: int, megabytes: int, expected: int) -> None:
    assert kv_heads_at_once(num_kv_heads, megabytes << 20) == expected


def test_heads_in_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_config, "L2_BYTES", 1)
    verify(Case(((20, 20), (3, 5)), 6, 3, config=POINTERS))


# ---- bad input -----------------------------------------------------------------------------------

GOOD = Case(((3, 3), (2, 5)), 4, 2, 16, 24)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda q: q.half()}, r"q is torch.float16 and k torch.float32"),
        ({"v": lambda v: v.int()}, r"v is torch.int32; it must be float32 or"),
        ({"q": lambda q: q[0]}, r"q is \[4, 16\]; it must be \[N, H, D\]"),
        ({"k": lambda k: k[..., :8]}, r"k is \[11, 2, 8\]; it must be \[S, Hkv, 16\]"),
        ({"v": lambda v: v[1:]}, r"v is \[10, 2, 24\]; it must be \[11, 2, Dv\]"),
        ({"v": lambda v: v[:, :1]}, r"v is \[11, 1, 24\]"),
        ({"q": lambda q: q[:, :3]}, "3 query heads cannot share 2 KV heads"),
        ({"k": lambda k: k.mT.contiguous().mT}, "k has strides .* must be contiguous"),
        ({"v": lambda v: v[..., :12]}, "v has a head_dim of 12; it must be a multiple of 8"),
        ({"v": lambda v: v.repeat(1, 1, 11)}, "v has a head_dim of 264; .* at most 256"),
        ({"query_start": lambda s: s.long()}, "query_start is torch.int64; it must be int32"),
        ({"key_start": lambda s: s[1:]}, r"key_start is \[2\]; it must be \[3\]"),
        ({"query_start": lambda s: s[:0], "key_start": lambda s: s[:0]}, "query_start is empty"),
        ({"key_start": lambda s: s.repeat(2)[::2]}, "key_start has shape .* must be contiguous"),
        ({"k": lambda k: k.to("meta")}, "q is on cpu and k on meta"),
    ],
)
def test_bad_tensors(change: dict, message: str) -> None:
    inputs = inputs_of(GOOD, "cpu")._asdict()
    inputs |= {name: function(inputs[name]) for name, function in change.items()}
    with pytest.raises(KernelError, match=message):
        flash_attention.flash_attention(**inputs, scale=0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scale": 0.0}, "scale is 0.0; it must be above 0"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; it must be above 0"),
        ({"window": 0}, "window is 0 and causal True; a window is at least 1"),
        ({"window": 4, "causal": False}, "window is 4 and causal False"),
        ({"out": torch.empty(8, 4, 16)}, r"out is \[8, 4, 16\]; it must be \[8, 4, 24\]"),
        ({"out": torch.empty(8, 4, 24).half()}, "out is torch.float16 on cpu; it must be"),
        ({"config": DESCRIBED}, "descriptors need half precision"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        flash_attention.flash_attention(*inputs_of(GOOD, "cpu"), **{"scale": 0.25} | arguments)


# ---- deliberate bugs -----------------------------------------------------------------------------

TILES = Case(((37, 37),), 1, 1, config=POINTERS)
SHARP = Case(((37, 37),), 1, 1, config=POINTERS, sharpness=1e4)
SHARED = Case(((4, 4),), 4, 2)
NEIGHBOURS = Case(((9, 37), (33, 40)), 1, 1, config=POINTERS, bad=1)
NEIGHBOURS_DESCRIBED = Case(((9, 37), (8, 8)), 1, 1, dtype=F16, config=DESCRIBED, bad=1)
NEIGHBOURS_SPECIALISED = Case(((9, 37), (8, 8)), 1, 1, dtype=F16, config=SPECIALISED, bad=1)
CROSS = Case(((9, 37),), 1, 1, causal=False, config=POINTERS)
BLIND = Case(((7, 3), (2, 1)), 1, 1)
WINDOW = Case(((40, 90),), 1, 1, window=40, config=POINTERS)
CAPPED = Case(((20, 40),), 1, 1, soft_cap=1.5, config=POINTERS, sharpness=4.0)
GAPS = Case(((20, 40),), 1, 1, 24, 24, config=POINTERS, gaps=True)
SEVERAL = Case(((1, 1), (3, 3), (2, 2)), 1, 1)
ROWS_STORED = "mask=(rows < num_rows) & (columns < DIM))"
SCORES = 'tl.trans(k_tile), input_precision="ieee")'
BUGS = {
    "sums of values not rescaled": (
        "acc = acc * correction[:, None]\n", "acc = acc * 1.0\n", TILES,
    ),
    "sum of weights not rescaled": ("row_sum * correction", "row_sum", TILES),
    "rescaled by the largest score of the tile": ("tl.maximum(row_max, tl.max(", "(tl.max(", SHARP),
    "a query does not see itself": ("keys[None, :] <= pos", "keys[None, :] < pos", TILES),
    "a query sees the next": ("<= positions[:, None]\n", "<= positions[:, None] + 1\n", TILES),
    "full tiles to the last row's": (
        "full_end = tl.maximum(first", "full_end = tl.maximum(last", TILES,
    ),
    "last tile left out": ("end = last + 1\n", "end = full_end\n", TILES),
    "first row instead of position": (
        "first = first_row + num_keys - num_queries", "first = first_row", WINDOW,
    ),
    "window one too long": (
        "> positions[:, None] - window", ">= positions[:, None] - window", WINDOW,
    ),
    "window begins a tile late": (
        "first - window + 1, 0) // BLOCK_N", "last - window + 1, 0) // BLOCK_N", WINDOW,
    ),
    "full tiles before the window": (
        "tl.cdiv(tl.maximum(last -", "tl.cdiv(tl.maximum(first -", WINDOW,
    ),
    "KV heads interleaved": ("head // GROUP", "head % GROUP", SHARED),
    "rows behind the end read": (
        "mask=(rows < num_rows) & (columns < DIM), other", "mask=columns < DIM, other", NEIGHBOURS,
    ),
    "keys behind the end seen": ("(keys < num_keys)[None, :]", "(keys >= 0)[None, :]", CROSS),
    "values behind the end weighted": (
        "tl.where((keys < num_keys)[:, None], v_tile, 0.0)", "v_tile", NEIGHBOURS_DESCRIBED,
    ),
    "descriptor ends late": (
        "end = key_begin + num_keys\n", "end = key_begin + num_keys + 8\n", NEIGHBOURS_SPECIALISED,
    ),
    "rows behind the end stored": (ROWS_STORED, "mask=columns < DIM)", SEVERAL),
    "columns behind the row stored": (ROWS_STORED, "mask=rows < num_rows)", GAPS),
    "columns behind the row read": ("if DIM < COLUMNS:", "if DIM > COLUMNS:", GAPS),
    "blind rows are NaN": ("tl.where(row_sum == 0, 1.0, row_sum)", "row_sum", BLIND),
    "largest score of nothing": (
        'tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max", BLIND,
    ),
    "no cap at the diagonal": ("if SOFT_CAP:", "if SOFT_CAP and not MASKED:", CAPPED),
    "cap at the diagonal only": ("if SOFT_CAP:", "if SOFT_CAP and MASKED:", CAPPED),
    "cap twice as steep": ("2 * LOG2_E * scale", "4 * LOG2_E * scale", CAPPED),
    "exponential of base 2": ("LOG2_E * (scale", "(scale", TILES),
    "scaled twice": (SCORES, SCORES + " * exponent_scale", TILES),
    "too few blocks": ("config.block_m + num_sequences", "config.block_m + 1", SEVERAL),
    "sequence begins a block late": ("(begins <= block)", "(begins < block)", SEVERAL),
    "keys of the first sequence": (
        "row = key_begin + start", "row = start + 0 * key_begin", SEVERAL,
    ),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    old, new, case = BUGS[bug]
    broken = mutant(flash_attention, old, new, tmp_path)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        verify(case, kernels=broken)
    text = str(caught.value)
    assert isinstance(caught.value, Mismatch) or "OutOfBoundsError" in text, text


def test_the_right_kernel_passes_where_the_bugs_do_not() -> None:
    for case in {case for _, _, case in BUGS.values()}:
        verify(case)


# ---- the benchmark -------------------------------------------------------------------------------


def test_every_measurement_runs() -> None:
    for measurement in measurements(tiny=True):
        got = measurement.run(measurement.num_sets - 1)
        assert isinstance(got, torch.Tensor)
        assert got.isfinite().all()
        assert measurement.num_bytes > 0
        assert measurement.num_flops > 0
