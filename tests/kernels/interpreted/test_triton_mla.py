import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from triton.runtime.errors import InterpreterError

from minillm_kernels import (
    launch,
    mla,
    mla_config,
    mla_tiles,
    paged_parts,
    paged_prefill,
    reference,
)
from minillm_kernels.check import mla as check
from minillm_kernels.check.case import Mismatch
from minillm_kernels.check.pages import poisoned_memory
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError
from minillm_kernels.mla_config import Config, Tile
from tests.kernels.mutants import convicted, mutant

FILES = (mla, mla_tiles, paged_prefill, paged_parts)
BY_SEED = {case.seed: case for case in check.CASES}
# Fewer sequences are enough to convict most deliberate bugs.
BY_SEED[1] = replace(BY_SEED[1], sequences=((3, 40), (7, 7), (1, 33)))
BY_SEED[2] = replace(BY_SEED[2], sequences=((1, 37), (2, 5)))
BY_SEED[14] = replace(BY_SEED[14], sequences=((1, 70), (3, 40)))


def test_every_form_has_a_case() -> None:
    assert {case.form for case in check.CASES} == set(check.FORMS)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[pytest.mark.slow] * (place > 0))
     for place, case in enumerate(check.INVARIANT_CASES)],
    ids=lambda case: case.form,
)  # fmt: skip
def test_bits_depend_on_a_tokens_own_keys_only(case: check.Case) -> None:
    with ordered_dots():
        check.verify_invariant(case, "cpu")


def test_nothing_to_do() -> None:
    given = check.inputs(check.Case(((0, 5),)), "cpu")
    assert check.run(check.Case(((0, 5),)), mla, given).shape == (0, 4, 32)


# ---- several queries of a sequence ---------------------------------------------------------------


class Launches:
    """In the place of a kernel: remembers its grids, and does nothing."""

    def __init__(self) -> None:
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.grids.append(grid)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Grids of the decode and of the prefill kernel, in this order."""
    launches = Launches()
    monkeypatch.setattr(mla, "_decode_kernel", launches)
    monkeypatch.setattr(mla, "_prefill_kernel", launches)
    monkeypatch.setattr(mla, "_combine_kernel", Launches())
    return launches


@pytest.mark.parametrize(
    ("num_heads", "query_lens", "max_query_len", "grids"),
    [  # 132 multiprocessors of an H100, tables of 4,096 positions: 16 splits at most
        (16, (1,), 1, [(1, 16, 1)]),
        (16, (5,), 5, [(2, 16, 1)]),  # 80 queries, in tiles of 64
        (16, (5,) * 8, 5, [(2, 8, 8)]),
        (16, (16,), 16, [(4, 16, 1)]),
        (16, (2,), 2, [(1, 16, 1)]),  # 32 queries
        (4, (16, 3, 1), 16, [(1, 16, 3)]),
        (128, (5,), 5, [(10, 13, 1)]),
        (16, (17,), 17, [(5,)]),
        (16, (17, 1), 17, [(1, 16, 2), (6,)]),
        (16, (17, 1), None, [(1, 16, 2), (6,)]),
    ],
)
def test_a_few_queries_are_split_over_the_gpu(
    num_heads: int, query_lens: tuple[int, ...], max_query_len: int | None,
    grids: list[tuple[int, ...]], launches: Launches, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By shapes alone, which is what a CUDA graph keeps."""
    monkeypatch.setattr(launch, "arch", lambda: 90)
    rows = len(query_lens)
    mla.mla_attention(
        torch.zeros(sum(query_lens), num_heads, 576, dtype=torch.bfloat16),
        torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16),
        512,
        torch.tensor([0, *query_lens]).cumsum(0),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, 64, dtype=torch.int32),
        0.1,
        max_query_len=max_query_len,
    )
    assert launches.grids == grids


def test_a_workspace_has_a_limit(launches: Launches) -> None:
    """In the batch-invariant mode a table of a long context has many splits."""
    case = check.Case(((5, 70), (3, 20)), form="rows", split=32, tokens=4, batch_invariant=True)
    given_, config = check.inputs(case, "cpu"), case.config
    assert config is not None
    splits = -(-given_.pages.block_tables.shape[1] * case.block_size // 32)
    needed = 4 * 2 * 5 * case.num_heads * splits * case.value_dim
    for limit, grids in ((needed, [(2, splits, 2)]), (needed - 1, [(4,)])):
        check.run(case, mla, given_, max_query_len=5, config=replace(config, max_workspace=limit))
        assert launches.grids == grids
        launches.grids.clear()


def decode_fewer_than_there_are(longest: int, split: int, kernels: ModuleType = mla) -> None:
    """A sequence longer than `max_query_len` has no place in the workspace, and no result."""
    case = check.Case(((9, 150), (2, longest)), form="rows", tokens=4, split=split)
    given_ = check.inputs(case, "cpu")
    wanted = check.run(case, mla, given_)
    out = torch.full_like(wanted, check.UNTOUCHED)
    with poisoned_memory():
        check.run(case, kernels, given_, max_query_len=2, out=out)
    torch.testing.assert_close(out[9:], wanted[9:])
    assert bool((out[:9] == check.UNTOUCHED).all())


@pytest.mark.parametrize(("longest", "split"), [(170, 0), (270, 0), (170, 64)])
def test_more_queries_than_said_write_nothing_else(longest: int, split: int) -> None:
    decode_fewer_than_there_are(longest, split)


@pytest.mark.mutation
@pytest.mark.parametrize(
    ("old", "new", "longest"),
    [
        ("(first_token >= query_len) | (query_len > few)", "first_token >= query_len", 170),
        ("(token >= query_len) | (query_len > few)", "token >= query_len", 270),  # with splits
    ],
)
def test_more_queries_than_said_are_noticed(
    old: str, new: str, longest: int, tmp_path: Path
) -> None:
    with pytest.raises((AssertionError, InterpreterError)):
        decode_fewer_than_there_are(longest, 0, mutant(FILES, old, new, tmp_path))


# ---- deliberate bugs ---------------------------------------------------------------------------


# What is broken, the line and what it becomes, and the seed of a case that has to show it.
BUGS = {
    "no rotated part": ("(q_rope, tl.trans(rope)", "(q_rope * 0.0, tl.trans(rope)", 9),
    "key from the wrong columns": ("r[None, :], mask=valid", "D + r[None, :], mask=valid", 9),
    "value from the wrong columns": ("tl.expand_dims(rows, KEYS) + r",
        "tl.expand_dims(rows, KEYS) + (r + 1) % R", 5),
    "no rescale": ("acc = acc * tl.expand_dims(decay, KEYS)", "acc = acc", 9),
    "sees the next token": ("visible = key <= query", "visible = key <= query + 1", 1),
    "does not see itself": ("visible = key <= query", "visible = key < query", 1),
    "window one too wide": ("key > query - window", "key >= query - window", 9),
    "window begins a tile late": ("tl.maximum(seq_len - query_len + 1 - window, 0) // BLOCK_N",
        "tl.cdiv(tl.maximum(seq_len - query_len + 1 - window, 0), BLOCK_N)", 9),
    "unguarded tail": ("mask=valid[:, None] & (r < R)[None, :]", "mask=(r < R)[None, :]", 2),
    "unguarded tail of a bulk copy": ("end // BLOCK_N * BLOCK_N",
        "tl.cdiv(end, BLOCK_N) * BLOCK_N", 3),
    "next page not looked up": ("table_ptr + following // PAGE", "table_ptr + start // PAGE", 3),
    "tile at the start of its page": ("PAGE + start % PAGE", "PAGE", 19),
    "table column off by one": ("table_ptr + positions // PAGE",
        "table_ptr + positions // PAGE + 1", 2),
    "wrong head tile": ("heads = head_tile * BLOCK_H +", "heads = head_tile * (BLOCK_H // 2) +", 3),
    "heads behind the last": ("inside = (tokens < query_len) & (heads < num_heads)",
        "inside = tokens < query_len", 3),
    "wrong head tile in prefill": (
        "tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // head_tiles",
        "tile = (tl.num_programs(0) - 1 - tl.program_id(0)) % head_tiles", 3,
    ),
    "tokens behind the last": ("inside = (tokens < query_len) & (heads < num_heads)",
        "inside = heads < num_heads", 1),
    "chunk at the wrong place": ("seq_len - query_len + tokens, -1", "tokens, -1", 1),
    "natural logarithm": ("scale *= math.log2(math.e)", "scale *= 1.0", 1),
    "empty splits combined": ("mask=every < last, other=0.0", "mask=every < splits, other=0.0", 6),
    "splits not rescaled": ("part * tl.exp2(score - shift)[:, None]", "part", 6),
    "merged without rescale": ("tl.fma(part_total, new, total * old)", "total + part_total", 14),
    "last split forgotten": ("tl.cdiv(seq_len - origin, size)",
        "tl.maximum((seq_len - origin) // size, 1)", 6),
    "no key at all": ("tl.where(total == 0.0, 1.0, total)", "total", 5),
    "tile of the wrong sequence": ("begin <= index", "begin < index", 1),
    # Several queries of a sequence.
    "all see what the last one does": ("seq_len - query_len + tokens, -1", "seq_len - 1, -1", 40),
    "all see what the tile's first one does": ("tl.minimum(first_place + BLOCK_Q, seq_len)",
        "tl.minimum(first_place + 1, seq_len)", 41),
    "the first tile's tokens again": ("tl.program_id(0) // head_tiles * BLOCK_Q",
        "tl.program_id(0) // head_tiles * 0", 41),
    "head tiles for query tiles": ("tl.program_id(0) // head_tiles * BLOCK_Q",
        "tl.program_id(0) % head_tiles * BLOCK_Q", 42),
    "heads for tokens": ("first_token + lanes // BLOCK_H", "first_token + lanes % BLOCK_Q", 41),
    "a tile too few": ("triton.cdiv(few, tile.block_q) * triton.cdiv(num_heads",
        "triton.cdiv(num_heads", 41),
    "the last query's window for all": ("tl.maximum(first_place - window + 1, 0)",
        "tl.maximum(seq_len - window, 0)", 45),
    "splits of one query's window": ("tl.maximum(seq_len - query_len + 1 - window, 0)",
        "tl.maximum(seq_len - window, 0)", 46),
    "another cut where splits are combined": ("tl.load(lens_ptr + row), query_len, window, splits",
        "tl.load(lens_ptr + row), 1, window, splits", 46),
    "splits overlap": ("tl.minimum(origin + split * size + size, end)", "end", 41),
    "a query's splits in its neighbour's place": ("parts = ((row * few + tokens) * num_heads",
        "parts = ((row + tokens) * num_heads", 41),
    "splits of all queries in one place": ("parts = ((row * few + tokens) * num_heads",
        "parts = ((row * few + first_token) * num_heads", 41),
    "a head's splits for a query": ("tl.program_id(0) // num_heads, tl.program_id(0) % num_heads",
        "tl.program_id(0) % num_heads, tl.program_id(0) // num_heads", 41),
    "the first query's result for all": ("out_ptr + (start + token).to(tl.int64)",
        "out_ptr + start.to(tl.int64)", 41),
    "queries that are not there are combined": ("(token >= query_len) | (query_len > few)",
        "query_len > few", 48),
    "left by one kernel to the other": ("_prefill(arguments, config, few, scale, window)",
        "_prefill(arguments, config, 16, scale, window)", 1),
}  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_found(name: str, tmp_path: Path) -> None:
    old, new, seed = BUGS[name]
    assert convicted(check.verify, [BY_SEED[seed]], mutant(FILES, old, new, tmp_path))


INVARIANCE_BUGS = {
    "prefill without splits": ("SPLIT=config.split, **_shared", "SPLIT=0, **_shared"),
    "splits from shapes": (
        "SPLIT=config.split,\n        LEAST=LEAST_TILES, PA",
        "SPLIT=0,\n        LEAST=1, PA",
    ),
    "the next token is seen": ("key <= query\n", "key <= query + 1\n"),
    "tiles for as many queries as there are": (
        "batch_invariant, max",
        "batch_invariant and not few, max",
    ),
}


@pytest.mark.mutation
@pytest.mark.parametrize("name", INVARIANCE_BUGS)
def test_a_bug_of_the_batch_invariant_mode_is_found(name: str, tmp_path: Path) -> None:
    kernels = mutant(FILES, *INVARIANCE_BUGS[name], tmp_path)
    case = replace(check.INVARIANT_CASES[0], sequences=((3, 68), (1, 130)), dtype=torch.float32)
    if "tiles" in name:
        case = replace(case, form="chosen", split=0)
    with ordered_dots(), pytest.raises(Mismatch, match="other bits"):
        check.verify_invariant(case, "cpu", kernels)


# ---- arguments that do not fit -----------------------------------------------------------------


def call(**changes: object) -> torch.Tensor:
    arguments: dict = {
        "q": torch.zeros(3, 4, 20),
        "latent_cache": torch.zeros(5, 1, 8, 20),
        "value_dim": 16,
        "query_start": torch.tensor([0, 1, 3]),
        "seq_lens": torch.tensor([9, 3]),
        "block_tables": torch.tensor([[0, 1], [2, 99]]),
        "scale": 1.0,
    }
    return mla.mla_attention(**(arguments | changes))  # type: ignore[arg-type]


BIG = Tile(block_h=16, block_q=1, block_n=32, swap=False)
BAD: dict[str, dict] = {
    "scale is nan; it must be positive and finite": {"scale": math.nan},
    r"q is \[3, 80\]; it must be \[N, H, R \+ Dr\]": {"q": torch.zeros(3, 80)},
    r"latent_cache is \[5, 8, 20\]": {"latent_cache": torch.zeros(5, 8, 20)},
    r"latent_cache is \[5, 1, 8, 24\]; it must be \[blocks, 1, block_size, 20\]": {
        "latent_cache": torch.zeros(5, 1, 8, 24)
    },
    "must be contiguous": {"latent_cache": torch.zeros(5, 1, 20, 8).transpose(2, 3)},
    "last dimension must be contiguous": {"q": torch.zeros(3, 20, 4).transpose(1, 2)},
    "q is torch.float32 and latent_cache torch.float16": {
        "latent_cache": torch.zeros(5, 1, 8, 20).half()
    },
    "q is torch.float64": {
        "q": torch.zeros(3, 4, 20).double(),
        "latent_cache": torch.zeros(5, 1, 8, 20).double(),
    },
    "seq_lens is torch.float32; it must be int32 or int64": {"seq_lens": torch.ones(2)},
    r"query_start is \[2\]; it must be \[3\]": {"query_start": torch.tensor([0, 3])},
    r"block_tables is \[1, 2\]": {"block_tables": torch.tensor([[0, 1]])},
    "value_dim is 20 of a key of 20": {"value_dim": 20},
    "value_dim is 0": {"value_dim": 0},
    "value_dim is 600 of a key of 700; it must be from 1 to 512": {
        "value_dim": 600, "q": torch.zeros(3, 4, 700), "latent_cache": torch.zeros(5, 1, 8, 700)
    },
    "rotated part of a key is 184; it must be at most 128": {
        "q": torch.zeros(3, 4, 200), "latent_cache": torch.zeros(5, 1, 8, 200)
    },
    "there are 65536 sequences; at most 65535": {
        "query_start": torch.zeros(65537, dtype=torch.int32),
        "seq_lens": torch.zeros(65536, dtype=torch.int32),
        "block_tables": torch.zeros(65536, 0, dtype=torch.int32),
    },
    "window is 0": {"window": 0},
    "max_query_len is 0": {"max_query_len": 0},
    r"seq_lens\[0\] is 17, which needs 3 blocks of 8": {"seq_lens": torch.tensor([17, 3])},
    r"block_tables\[0, 1\] is 5; the cache has blocks 0 to 4": {
        "block_tables": torch.tensor([[0, 5], [2, 99]])
    },
    r"out is \[3, 4, 20\]": {"out": torch.zeros(3, 4, 20)},
    "out is torch.float16": {"out": torch.zeros(3, 4, 16).half()},
    "interpreted kernels need CPU tensors|is on meta": {"q": torch.zeros(3, 4, 20, device="meta")},
    "blocks must be powers of two": {"config": Config(replace(BIG, block_n=48), BIG)},
    "it must have 16 queries": {"config": Config(BIG, replace(BIG, block_h=8))},
    "a page of 8 must be a multiple of 32": {"config": Config(replace(BIG, descriptors=True), BIG)},
    "a split of 48 positions": {"config": Config(BIG, BIG, split=48)},
    "decode has 32 keys and prefill 64": {"config": Config(BIG, replace(BIG, block_n=64), 64)},
}  # fmt: skip


@pytest.mark.parametrize("sentence", BAD)
def test_what_does_not_fit_is_refused(sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        call(**BAD[sentence])


def test_what_fits_is_computed_from_strided_tensors_too() -> None:
    rng = torch.Generator().manual_seed(5)
    q = torch.randn(3, 2, 4, 20, generator=rng)[:, 1]
    cache = torch.randn(5, 1, 8, 20, generator=rng)
    out = torch.zeros(3, 4, 2, 16)[:, :, 0]
    got = call(q=q, latent_cache=cache, out=out)
    assert got.data_ptr() == out.data_ptr()
    tables, lens = torch.tensor([[0, 1], [2, 99]]), torch.tensor([9, 3])
    wanted = reference.mla_attention(q, cache, 16, torch.tensor([0, 1, 3]), lens, tables, 1.0)
    torch.testing.assert_close(out, wanted)


# ---- what is chosen ------------------------------------------------------------------------------


def test_splits_fill_the_processors_and_no_more() -> None:
    config = mla_config.choose(90, torch.bfloat16, 16, 64)

    def splits(rows: int, heads: int = 16, positions: int = 32768) -> int:
        return mla_config.count_splits(config, rows, heads, positions, 132)

    assert splits(1) == 128  # at least four tiles of 64 in each
    assert splits(1, positions=2048) == 8
    assert splits(1, positions=64) == 1
    assert splits(64) == 2
    assert splits(80) == 3  # 240 programs in two rounds, instead of 80 in one
    assert splits(256) == 1
    assert mla_config.count_splits(config, 64, 16, 32768, 132, few=2) == 1  # twice the programs


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_batch_invariant_tiles_depend_on_nothing_that_changes(arch: int) -> None:
    configs = {
        mla_config.choose(arch, torch.bfloat16, 16, page, invariant=True, few=few)
        for page in (1, 16, 64, 256)
        for few in (1, 2, 5, 16)
    }
    assert len(configs) == 1
    (config,) = configs
    assert config.split
    assert config.decode.block_h * config.decode.block_q == (
        config.prefill.block_h * config.prefill.block_q
    )
    assert replace(config.decode, block_h=1, block_q=1) == replace(
        config.prefill, block_h=1, block_q=1
    )
