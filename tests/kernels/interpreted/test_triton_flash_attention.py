"""`flash_attention` interpreted: bad input, and deliberate bugs that `verify` must find."""

from pathlib import Path

import pytest
import torch

from minillm_kernels import flash_attention
from minillm_kernels.check.flash_attention import BF16, MIXED, Case, inputs_of, verify
from minillm_kernels.launch import KernelError
from tests.kernels.mutants import convicted, mutant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a row of NaN has no largest


GOOD = Case(((3, 3), (2, 5)), 4, 2, 16, 24)
NAMES = ("q", "k", "v", "query_start", "key_start")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": lambda q: q.half()}, r"q is torch.float16 and k torch.float32"),
        ({"v": lambda v: v.int()}, r"v is torch.int32; it must be float32 or"),
        ({"q": lambda q: q[0]}, r"q is \[4, 16\]; it must be \[N, H, D\]"),
        ({"k": lambda k: k[..., :8]}, r"k is \[11, 2, 8\]; it must be \[S, Hkv, 16\]"),
        ({"v": lambda v: v[1:]}, r"v is \[10, 2, 24\]; it must be \[11, 2, Dv\]"),
        ({"q": lambda q: q[:, :3]}, "3 query heads cannot share 2 KV heads"),
        ({"k": lambda k: k.mT.contiguous().mT}, "k has strides .* must be contiguous"),
        ({"v": lambda v: v[..., :12]}, "v has a head_dim of 12; it must be a multiple of 8"),
        ({"query_start": lambda s: s.long()}, "query_start is torch.int64; it must be int32"),
        ({"query_start": lambda s: s[1:]}, r"query_start is \[2\]; it must be \[3\]"),
        ({"key_start": lambda s: s.repeat(2)[::2]}, "key_start has shape .* must be contiguous"),
        ({"key_start": lambda s: s + 9}, "key_start is .* it must begin with 0"),
        ({"k": lambda k: k.to("meta")}, "q is on cpu and k on meta"),
        ({"out": lambda _: torch.empty(8, 4, 16)}, r"out is \[8, 4, 16\]; it must be \[8, 4, 24\]"),
        ({"block": lambda _: 24}, "block is 24; it must be a power of two and at least 16"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    given = dict(zip(NAMES, inputs_of(GOOD, "cpu"), strict=True))
    given |= {name: function(given.get(name)) for name, function in change.items()}
    with pytest.raises(KernelError, match=message):
        flash_attention.flash_attention(**given, scale=0.25)


TILES = Case(((37, 37),), 1, 1)
SHARP = Case(((37, 37),), 1, 1, sharpness=1e4)
SEVERAL = Case(MIXED, 1, 1, bad=1)
GAPS = Case(((20, 40),), 2, 1, 24, 24, BF16, gaps=True)
CROSS = Case(((9, 37), (5, 20)), 1, 1, causal=False)
BLIND = Case(((40, 20),), 1, 1)
BUGS = {
    "maximum of the tile only": (
        "tl.maximum(row_max, tl.max(scores, axis=1))", "tl.max(scores, axis=1)", SHARP,
    ),
    "sum not rescaled": ("row_sum * correction +", "row_sum +", TILES),
    "values not rescaled": ("acc = acc * correction[:, None]", "acc = acc * 1.0", TILES),
    "weights not summed": ("tl.sum(weights, axis=1)", "tl.max(weights, axis=1)", TILES),
    "diagonal hidden": ("<= positions[:, None]", "< positions[:, None]", TILES),
    "one key too many": ("<= positions[:, None]", "<= positions[:, None] + 1", TILES),
    "aligned at the top left": ("first_row + num_keys - num_queries", "first_row", GAPS),
    "full tiles up to the last query": (
        "full, end = tl.maximum(first + 1, 0)", "full, end = tl.maximum(last + 1, 0)", TILES,
    ),
    "last key forgotten": (
        "tl.maximum(first + 1, 0), last + 1", "tl.maximum(first + 1, 0), last",
        Case(((33, 33),), 1, 1),
    ),
    "KV heads interleaved": ("head // GROUP, BLOCK, DIM", "head % GROUP, BLOCK, DIM",
                             Case(((5, 5),), 6, 3)),
    "rows behind the end read": (
        "(rows < count) & (columns < DIM)", "(rows >= 0) & (columns < DIM)", SEVERAL,
    ),
    "columns behind the row read": (
        "(rows < count) & (columns < DIM)", "(rows < count) & (columns >= 0)", GAPS,
    ),
    "keys behind the end seen": ("keys < num_keys", "keys >= 0", CROSS),
    "blind rows are NaN": ("tl.where(row_sum == 0, 1.0, row_sum)", "row_sum", BLIND),
    "largest score of nothing": (
        'tl.where(new_max == float("-inf"), 0.0, new_max)', "new_max", BLIND,
    ),
    "exponential of base 2": ("scale * LOG2_E", "scale", TILES),
    "keys of the first sequence": ("key, left = key_begin + start", "key, left = start", SEVERAL),
    "too few blocks": ("triton.cdiv(num_rows, block)", "(num_rows // block)", TILES),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    old, new, case = BUGS[bug]
    verify(case)
    assert convicted(verify, [case], mutant(flash_attention, old, new, tmp_path))
