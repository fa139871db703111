"""Pages of 8-bit codes, written and attended to: interpreted, with the bits of `int8_cache`. Cases
are run by test_triton_cases.py; the reference's own bounds are in tests/ops/test_int8_cache.py."""

from pathlib import Path

import pytest
import torch

from minillm_kernels import int8_cache, int8_pages, int8_tiles, paged_parts
from minillm_kernels.check import int8_pages as check
from minillm_kernels.launch import KernelError
from tests.kernels.engine_cases import TINY, generate, logprobs, open_engine, tokens
from tests.kernels.mutants import convicted, mutant

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy says it, a GPU does not


def test_every_scale_is_rounded_up_and_divides() -> None:
    """Rows of all sizes, from subnormal scales to those which no float16 holds."""
    rows = torch.randn(300, 1, 32, generator=check.generator(0))
    rows *= torch.logspace(-12, 8, 300)[:, None, None]
    rows[7], rows[8, 0, 1:] = 0, 0
    found = []
    for module in (int8_pages, int8_cache):
        pages = check.garbage(check.Case((), 1, 1, 32, 12), 25, "cpu")
        module.write_cache(rows, -rows, *pages, torch.arange(300))
        found.append(pages)
    for got, due in zip(*found, strict=True):
        check.same_bits(got, due, "a page")


def test_parts_are_numbered_as_positions() -> None:
    ends = [1, 128, 129, 1024, 1025, 1536, 1537]
    assert [int8_pages._num_parts(end) for end in ends] == [1, 1, 2, 8, 9, 9, 10]


@pytest.mark.slow
def test_the_engine_says_the_same(tmp_path, request) -> None:
    """Prompts in chunks, and decoding."""
    folder = TINY["llama"].write(tmp_path).folder
    options = {"kv_cache_dtype": "int8", "max_num_batched_tokens": 16}
    plain = generate(open_engine(folder, "cpu", **options), max_tokens=2)
    ran = request.getfixturevalue("kernels")
    outputs = generate(open_engine(folder, "cpu", **options), max_tokens=2)
    assert {"attention_kernel", "rope_write_kernel"} <= ran
    assert tokens(outputs) == tokens(plain)
    for got, due in zip(outputs, plain, strict=True):
        assert logprobs(got) == pytest.approx(logprobs(due), abs=5e-3)


def test_bits_do_not_depend_on_who_is_last(another_order) -> None:
    with another_order:
        for case in (4, 7):
            check.verify(check.CASES[case])


# ---- bad input ---------------------------------------------------------------------------------


def call(**changes: object) -> object:
    pages = check.garbage(check.Case((), 1, 1), 3, "cpu")
    names = "k_cache", "v_cache", "k_scale", "v_scale"
    arguments: dict[str, object] = {
        "q": torch.ones(2, 4, 32),
        **dict(zip(names, pages, strict=True)),
    }
    arguments |= {"query_start": torch.tensor([0, 2]), "seq_lens": torch.tensor([20])}
    arguments |= {"block_tables": torch.tensor([[2, 0]]), "scale": 0.2} | changes
    return int8_pages.paged_attention(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": torch.ones(2, 4, 40)}, r"k_cache is \[3, 1, 16, 32\]; it must be"),
        ({"q": torch.ones(2, 3, 36)}, "head_dim of 36; it must be a multiple of 8"),
        ({"k_cache": torch.zeros(3, 1, 16, 32)}, "k_cache is torch.float32; it must be uint8."),
        ({"v_cache": torch.zeros(3, 1, 16, 32)}, "v_cache is torch.float32; it must be int8."),
        ({"k_scale": torch.zeros(3, 1, 16)}, "k_scale is torch.float32; it must be float16."),
        ({"v_scale": torch.zeros(3, 16, 1).half()}, r"v_scale is \[3, 16, 1\]; it must be"),
        ({"seq_lens": torch.tensor([33])}, "needs 3 blocks of 16; its block table has 2"),
        ({"window": 0}, "window is 0; it must be at least 1, or None."),
        ({"scale": 0.0}, "scale is 0.0; it must be positive and finite."),
        ({"max_query_len": 0}, "max_query_len is 0; it must be at least 1, or None."),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        call(**changes)


# ---- mutations ---------------------------------------------------------------------------------

# What numpy's NaN hides, and a GPU's would not, has no bug here: `powers` and hidden scales.
BUGS = [
    ("keys are read with their 128", "(keys ^ 128)", "keys"),
    ("keys are written with 127", "codes + 128", "codes + 127"),
    ("keys in another order", "(0, 2, 1, 3)", "(0, 1, 2, 3)"),
    ("values in another order", "tl.permute(tl.reshape(rows, (16, BLOCK_D, 4)), (0, 2, 1))",
     "tl.reshape(rows, (16, 4, BLOCK_D))"),
    ("the scale of the next value", "v_scale + place + each", "v_scale + place + (each + 1) % 4"),
    ("the scale of the first key", "k_scale + place + each", "k_scale + place + 0 * each"),
    ("126 levels", "tl.div_rn(127.0, ", "tl.div_rn(126.0, "),
    ("the sum of neighbours", "(BLOCK_M, 2, 32 >> i)), 1", "(BLOCK_M, 32 >> i, 2)), 2"),
    ("another exponential", "2.4022242426872253e-1", "2.4022e-1"),
    ("NaN is not the largest", "tl.where(x == x, tl.abs(x), float(\"inf\"))", "tl.abs(x)"),
    ("a scale is rounded to nearest", "(scale.to(tl.float32) < wanted)", "(wanted < 0.0)"),
    ("the unrounded scale divides", "tl.where(wanted <= 65504.0, scale",
     "tl.where(wanted <= 65504.0, wanted"),
    ("sums keep their unit", "total * old)\n    return", "total)\n    return"),
    ("a window of one more", "> position[:, None] - window", ">= position[:, None] - window"),
    ("a query without itself", "seen <= position", "seen < position"),
    ("tiles begin at the window", "low // 64 * 64", "low"),
    ("later parts of 128", "8 + (position - 1024) // 512", "position // 128"),
    ("parts of one place", "part = first + begin + split", "part = first + begin"),
    ("the second half of a key in the place of the first", "DIM // 2 + pair, k_cache",
     "pair, k_cache"),
    ("the scale of half a key", "tl.maximum(largest_of(first), largest_of(second))",
     "largest_of(first)"),
    ("keys for values", "source += NUM_KV_HEADS * qkv_head_stride", "source += 0"),
    ("parts before the window", "first + begin + split", "first + split"),
    ("few queries are many", "(query_len > few) if APART", "(query_len >= few) if APART"),
    ("a path in tiles of four", "tail_start // 64 * 64", "(tail_start // 64 + 1) * 64"),
    ("the first of four keys", "4 * side + dims // 4", "dims // 4"),
    ("the first of four values", "side + dims * 4\n", "dims * 4\n"),
    ("a slot of another head", "(block * NUM_KV_HEADS + head) * BLOCK_SIZE + offset",
     "block * NUM_KV_HEADS * BLOCK_SIZE + offset * NUM_KV_HEADS + head"),
]  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize(("bug", "old", "new"), BUGS, ids=[each[0] for each in BUGS])
def test_a_bug_is_found(bug: str, old: str, new: str, tmp_path: Path) -> None:
    assert convicted(
        check.verify, check.CASES, mutant([int8_pages, int8_tiles, paged_parts], old, new, tmp_path)
    )
