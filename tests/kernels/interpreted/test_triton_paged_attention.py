"""`paged_attention` interpreted: every case against float64, bits in the batch-invariant mode, bad
input, and deliberate bugs that `verify` must find."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minillm_kernels import paged_attention, paged_decode, paged_parts, paged_prefill
from minillm_kernels.check.paged_attention import (
    BLOCK_N,
    MIXED,
    Case,
    inputs,
    run,
    verify,
    verify_invariant,
)
from minillm_kernels.interpreter import ordered_dots
from minillm_kernels.launch import KernelError
from minillm_kernels.paged_config import choose, count_splits
from tests.kernels.interpreted.conftest import programs_in
from tests.kernels.mutants import convicted, mutant

# exp2 of a soft cap's argument is infinite for large scores, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning")


def test_no_rows_and_no_sequences() -> None:
    given_ = inputs(Case(((0, 20), (0, 0))), "cpu")
    assert run(Case(()), paged_attention, given_).shape == (0, 4, 32)
    empty = replace(
        given_,
        q=torch.ones(3, 4, 32),
        query_start=torch.zeros(1, dtype=torch.int32),
        pages=replace(
            given_.pages,
            block_tables=given_.pages.block_tables[:0],
            seq_lens=given_.pages.seq_lens[:0],
        ),
    )
    case = Case((), batch_invariant=True)
    assert torch.equal(run(case, paged_attention, empty), torch.zeros(3, 4, 32))
    assert run(Case(()), paged_attention, empty).isnan().all()


# ---- the batch-invariant mode ----------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        Case(((1, 40), (5, 69)), 2, 1, form="rows", seed=31),
        Case(((2, 72),), 2, 1, form="rows", window=20, dtype=torch.float16),
        Case(((3, 70),), 3, 1, 16, 64, form="bulk", dtype=torch.bfloat16, soft_cap=3.0, seed=32),
    ],
    ids=["plain", "window", "soft-cap"],
)
def test_bits_depend_on_query_position_and_keys_only(case: Case) -> None:
    with ordered_dots():
        verify_invariant(case)


# ---- configurations ---------------------------------------------------------------------------


def test_splits_fill_the_waves() -> None:
    assert count_splits(8, 512, 132, 4) * 8 > 0.8 * 3 * 132  # one long row: every place is taken
    assert count_splits(512, 64, 132, 4) == 2  # 1.3 waves would leave the second one empty
    assert count_splits(4096, 64, 132, 4) == 1
    assert count_splits(8, 3, 132, 4) == 1  # never under four tiles
    assert count_splits(8, 16, 132, 4) == 4


@pytest.mark.parametrize("capability", [0, 80, 90, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_configurations_have_whole_splits(
    capability: int, dtype: torch.dtype, head_dim: int
) -> None:
    config = choose(capability, dtype, head_dim)
    assert config.split_size % config.invariant.block_n == 0
    for tiles in (config.prefill, config.invariant):
        assert tiles.block_m & (tiles.block_m - 1) == 0


# ---- bad input --------------------------------------------------------------------------------


def called(**changes: Any) -> torch.Tensor:
    given_ = inputs(Case(((1, 20), (3, 5))), "cpu")
    arguments = {
        "q": given_.q,
        "k_cache": given_.pages.caches[0],
        "v_cache": given_.pages.caches[1],
        "query_start": given_.query_start,
        "seq_lens": given_.pages.seq_lens,
        "block_tables": given_.pages.block_tables,
        "scale": 0.2,
    }
    return paged_attention.paged_attention(**arguments | changes)


ROWS = Case(MIXED, form="rows")
SHORT = torch.zeros(3, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"q": torch.zeros(4, 4, 32).half()}, r"q is torch.float16 and k_cache torch.float32"),
        ({"q": torch.zeros(4, 4, 24)}, r"k_cache is \[6, 2, 16, 32\]; it must be \[blocks, Hkv, "),
        ({"q": torch.zeros(4, 3, 32)}, "3 query heads cannot share 2 KV heads evenly"),
        ({"q": torch.zeros(4, 4, 64)[..., ::2]}, "q has strides .* last dimension must be cont"),
        ({"q": torch.zeros(4, 4, 32, device="meta")}, "q is on meta and k_cache on cpu"),
        ({"v_cache": torch.zeros(6, 2, 8, 32)}, r"v_cache is .* must be \[6, 2, 16, Dv\]"),
        ({"v_cache": torch.zeros(6, 2, 16, 20)}, "v_cache has a head_dim of 20"),
        ({"query_start": torch.zeros(2, dtype=torch.int32)}, r"query_start is \[2\]; .* \[3\]"),
        ({"seq_lens": torch.ones(2)}, "seq_lens is torch.float32; it must be int32 or int64"),
        ({"block_tables": torch.zeros(3, 4, dtype=torch.int32)}, r"block_tables is \[3, 4\]"),
        ({"block_tables": torch.zeros(2, 1, dtype=torch.int32)}, "which needs 2 blocks of 16"),
        ({"block_tables": torch.full((2, 2), 6)}, r"block_tables\[0, 0\] is 6; the cache has"),
        ({"scale": 0.0}, "scale is 0.0; it must be positive"),
        ({"scale": float("nan")}, "scale is nan; it must be positive"),
        ({"window": 0}, "window is 0; it must be at least 1"),
        ({"tails": (SHORT, SHORT[:, None])}, r"tail_starts is \[3\]; it must be \[2\]"),
        ({"tails": (SHORT[:2], SHORT[:2, None].long())}, "tail_order is torch.int64; it must be"),
        ({"tails": (SHORT[:2], SHORT[:2])}, r"tail_order is \[2\]; it must be \[2, T\]"),
        (
            {"tails": (SHORT, SHORT), "batch_invariant": True},
            "tails are given with batch_invariant",
        ),
        ({"soft_cap": -1.0}, "soft_cap is -1.0; it must be positive"),
        ({"max_query_len": 0}, "max_query_len is 0; it must be at least 1"),
        ({"out": torch.zeros(4, 4, 31)}, r"out is \[4, 4, 31\]; it must be \[4, 4, 32\]"),
        ({"config": replace(ROWS.config, split_size=BLOCK_N + 1)}, "split_size is 33"),  # type: ignore[type-var]
    ],
)
def test_bad_input(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KernelError, match=sentence):
        called(**changes)


def test_limits_of_heads_and_blocks() -> None:
    with pytest.raises(KernelError, match="129 query heads share a KV head; the maximum is 128"):
        called(
            q=torch.zeros(4, 129, 32),
            k_cache=torch.zeros(6, 1, 16, 32),
            v_cache=torch.zeros(6, 1, 16, 32),
        )
    for size in (257, 0):
        with pytest.raises(KernelError, match=f"blocks of {size} positions; it must be 1 to 256"):
            called(k_cache=torch.zeros(6, 2, size, 32), v_cache=torch.zeros(6, 2, size, 32))


SPLIT_ROWS = {"sequences": ((5, 37), (1, 0), (3, 270)), "max_query_len": 5, "splits": 3,
              "form": "rows", "num_heads": 8}  # fmt: skip


# ---- one machine code, at any size ------------------------------------------------------------


class Launches:
    """In the place of a kernel: remembers grids and arguments, and does nothing."""

    def __init__(self) -> None:
        self.seen: list[tuple[tuple[int, ...], tuple[Any, ...]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.seen.append((grid, args))


def test_a_table_with_room_for_more_splits_than_a_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = Launches()
    monkeypatch.setattr(paged_prefill, "invariant_kernel", launches)
    given_ = inputs(Case(((1, 20),)), "cpu")
    table = torch.zeros(1, 65_537 * 256 // 16, dtype=torch.int32)
    called(
        q=given_.q, query_start=given_.query_start, seq_lens=given_.pages.seq_lens,
        block_tables=table, batch_invariant=True, max_query_len=1,
    )  # fmt: skip
    assert launches.seen[0][0][2] == 1


def test_unused_splits_are_not_written() -> None:
    """A table is as wide as the longest context; a short row leaves most of its splits alone."""
    workspace: list[torch.Tensor] = []

    class Remembered(paged_attention._Call):
        def workspace(self, few: int, splits: int) -> tuple[torch.Tensor, torch.Tensor]:
            partial, stats = super().workspace(few, splits)
            workspace.extend((partial.fill_(torch.nan), stats.fill_(torch.nan)))
            return partial, stats

    case = Case(((1, 20), (1, 200)), batch_invariant=True, form="rows", splits=2, max_query_len=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_attention, "_Call", Remembered)
        verify(case)
    for part in workspace:
        assert part[0, 0, :, 1:].isnan().all()
        assert not part[1, 0].isnan()[:, :4].any()


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "query_lens", "max_query_len", "grids"),
    [  # of the decode kernel and of the prefill kernel; 132 multiprocessors, tables of 4,096
        (32, 8, (1,), 1, [(1, 8, 42)]),
        (32, 8, (5,), 5, [(1, 8, 42)]),  # 20 rows
        (32, 8, (16,), 16, [(1, 8, 42)]),  # 64 rows
        (16, 1, (16,), 16, [(4, 1, 55)]),  # 256 rows
        (32, 8, (5, 3, 1), 5, [(3, 8, 15)]),
        (32, 8, (17,), 17, [(2, 8)]),
        (32, 8, (17, 1), 17, [(3, 8), (2, 8, 21)]),
        (32, 8, (17, 1), None, [(3, 8), (2, 8, 21)]),
    ],
)
def test_a_few_queries_are_split_over_the_gpu(
    num_heads: int, num_kv_heads: int, query_lens: tuple[int, ...], max_query_len: int | None,
    grids: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """By shapes alone, which is what a CUDA graph keeps."""
    launches = Launches()
    monkeypatch.setattr(paged_prefill, "prefill_kernel", launches)
    monkeypatch.setattr(paged_decode, "decode_kernel", launches)
    rows, count = sum(query_lens), len(query_lens)
    paged_attention.paged_attention(
        torch.zeros(rows, num_heads, 64), *[torch.zeros(1, num_kv_heads, 16, 64)] * 2,
        torch.tensor([0, *query_lens]).cumsum(0).int(), torch.zeros(count, dtype=torch.int32),
        torch.zeros(count, 256, dtype=torch.int32), 0.1, max_query_len=max_query_len,
    )  # fmt: skip
    assert [grid for grid, _ in launches.seen] == grids


def test_a_workspace_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the batch-invariant mode a table of a long context has many splits."""
    launches = Launches()
    monkeypatch.setattr(paged_prefill, "invariant_kernel", launches)
    monkeypatch.setattr(paged_parts, "combine_kernel", Launches())
    case = Case(((5, 70), (3, 20)), batch_invariant=True, form="rows", splits=2, max_query_len=5)
    for limit, splits in ((2**26, 2), (2000, 1)):
        monkeypatch.setattr(paged_attention, "MAX_WORKSPACE", limit)
        run(case, paged_attention, inputs(case, "cpu"))
        assert launches.seen.pop()[0][2] == splits
    monkeypatch.undo()
    monkeypatch.setattr(paged_attention, "MAX_WORKSPACE", 2000)
    verify(case)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_queries_than_said_write_nothing_else(batch_invariant: bool) -> None:
    """A sequence longer than `max_query_len` has no place in the workspace."""
    case = Case(((9, 150), (2, 70)), form="rows", splits=2, batch_invariant=batch_invariant)
    given_ = inputs(case, "cpu")
    wanted = run(case, paged_attention, given_)
    got = run(case, paged_attention, given_, max_query_len=2)
    torch.testing.assert_close(got[9:], wanted[9:])
    if batch_invariant:
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("case", [SPLIT_ROWS, SPLIT_ROWS | {"form": "swap", "dtype": torch.half}])
def test_bits_do_not_depend_on_who_is_last(case: dict[str, Any], another_order) -> None:
    case = Case(**case)
    given_ = inputs(case, "cpu")
    with ordered_dots():
        usual = run(case, paged_attention, given_)
        with another_order:
            assert torch.equal(run(case, paged_attention, given_), usual)
            verify(case)


def test_heads_may_lie_far_apart() -> None:
    """Behind 2^31 elements, in queries and results alike (memory that is never touched)."""
    far = 1_100_000_000
    near = inputs(Case(((1, 5), (3, 5)), 3, 1, 8, dtype=torch.float16), "cpu")
    memory = torch.empty(2 * far + 4096, dtype=torch.float16)
    for invariant in (False, True):
        q = memory.as_strided((4, 3, 8), (16, far, 1)).copy_(near.q)
        out = memory.as_strided((4, 3, 8), (16, far, 1), 2048)
        wanted = run(Case((), head_dim=8), paged_attention, near, batch_invariant=invariant)
        got = paged_attention.paged_attention(
            q, *near.pages.caches, near.query_start, near.pages.seq_lens, near.pages.block_tables,
            8**-0.5, batch_invariant=invariant, out=out,
        )  # fmt: skip
        assert torch.equal(got, wanted)
    cache = memory.as_strided((4, 1, 2, 8), (8, 8, 2**30, 1))  # positions cannot
    with pytest.raises(KernelError, match="positions of a block must lie within"):
        called(q=near.q, k_cache=cache, v_cache=cache)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_windows_beyond_32_bits(batch_invariant: bool) -> None:
    case = Case(((1, 20), (3, 5), (2, 0)), 2, 1, batch_invariant=batch_invariant)
    verify(replace(case, window=2**40))


def test_a_cache_without_blocks() -> None:
    case = Case(((1, 0), (2, 0)), form="bulk", block_size=32)
    given_ = inputs(case, "cpu")
    caches = tuple(cache[:0] for cache in given_.pages.caches)
    empty = replace(given_, pages=replace(given_.pages, caches=caches))
    out = run(case, paged_attention, empty)
    assert torch.equal(out, torch.zeros_like(out))


# ---- deliberate bugs --------------------------------------------------------------------------


FILES = (paged_attention, paged_prefill, paged_decode, paged_parts)
DECODE = Case(((1, 37), (1, 70)), 2, 1, form="rows", max_query_len=1)
SPLIT = replace(DECODE, sequences=((1, 20), (1, 150)), splits=3)
LONG_SPLIT = Case(((1, 1200),), 1, 1, form="rows", splits=19, seed=3)
HEADS = replace(DECODE, sequences=((1, 9),), num_heads=4, num_kv_heads=2)
CHUNKS = Case(((1, 20), (40, 80)), 2, 1, form="rows", max_query_len=40)
LATER = replace(CHUNKS, sequences=((18, 50), (20, 25)))  # in the tile behind the first
INVARIANT = Case(((1, 70), (9, 80)), 2, 1, form="rows", batch_invariant=True)
SWAPPED = "acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * rescale,"
POSITION = "position = first + tl.arange(0, BLOCK_M) // GROUP"
SEVERAL = Case(((5, 37), (3, 70)), 4, 2, form="rows", max_query_len=5, splits=3, padding=2)
SEEN = "visible = visible & (each <= own)"
WINDOW = "visible = visible & (each > own - window)"
WINDOWS = replace(SEVERAL, sequences=((5, 137), (3, 70)), window=20)
TREE = Case(((1, 70), (1, 40), (3, 37)), 4, 2, form="rows", max_query_len=3, tree=True)
TILES = replace(SEVERAL, sequences=((9, 80), (16, 150)), num_heads=8, max_query_len=16)
APART = replace(SEVERAL, batch_invariant=True, sequences=((5, 150), (3, 70)), padding=0)
BUGS: tuple[tuple[str, str, str, Case], ...] = (
    ("no rescale of values", "p.to(v.dtype), v, acc * rescale, input",
     "p.to(v.dtype), v, acc, input", DECODE),
    ("no rescale, swapped", SWAPPED, SWAPPED.replace(" * rescale", ""),
     replace(DECODE, form="swap")),
    ("no rescale in a chunk", "acc * rescale[:, None]", "acc", CHUNKS),
    ("merge without rescale", "acc * tl.expand_dims(old, AXIS)", "acc", LONG_SPLIT),
    ("merge in registers without rescale", "acc * tl.expand_dims(old, AXIS)", "acc", INVARIANT),
    ("parts without weights", "tl.fma(part_acc, tl.expand_dims(new, AXIS)",
     "tl.fma(part_acc, tl.expand_dims(new * 0.0 + 1.0, AXIS)", SPLIT),
    ("empty splits are merged", "(0, used, num_stages=2)", "(0, num_splits, num_stages=2)",
     replace(SPLIT, sequences=((1, 100), (1, 150)))),
    ("empty splits are combined", "(0, used):", "(0, num_splits):", APART),
    ("the last but one merges", "== programs - 1", "== programs - 2", SPLIT),
    ("counters are left behind", "tl.store(place, 0)", "tl.store(place, programs)", SPLIT),
    ("nobody writes an empty sequence", "split >= tl.maximum(used, 1)", "split >= used",
     replace(SPLIT, sequences=((1, 0), (1, 150)))),
    ("a row does not see itself", "keys[None, :] <= position[:, None])",
     "keys[None, :] < position[:, None])", CHUNKS),
    ("a row sees the next one", POSITION, POSITION.replace("first +", "first + 1 +"), CHUNKS),
    ("window of a chunk too wide", "keys[None, :] > position[:, None] - window",
     "keys[None, :] >= position[:, None] - window", replace(CHUNKS, window=20)),
    ("window of a row too wide", "low = tl.maximum(first_position + 1 - window, 0)\n        full",
     "low = tl.maximum(first_position - window, 0)\n        full", replace(DECODE, window=20)),
    ("window's edge without a mask", "diagonal = tl.maximum(tl.maximum(first + 1",
     "inner = begin\n    diagonal = tl.maximum(tl.maximum(first + 1",
     replace(CHUNKS, sequences=((20, 150),), window=70)),
    ("diagonal without a mask", "tl.maximum(first + 1, 0) // BLOCK_N, inner)",
     "tl.maximum(first + BLOCK_N, 0) // BLOCK_N, inner)", CHUNKS),
    ("tail one too long", "high = first_position + count  #", "high = first_position + 2  #",
     DECODE),
    ("tail without a mask", "tl.minimum(end, tl.maximum(first_position + 1, 0) // BLOCK_N), begin)",
     "end, begin)", replace(DECODE, block_size=64)),
    ("NaN behind the end meets a weight of 0", "rows = tl.where(valid[:, None], rows, 0.0)",
     "pass", replace(DECODE, form="bulk", block_size=64)),
    ("query heads of another group", "(kv_head * GROUP + rows % GROUP).to(tl.int64) * strides",
     "(kv_head + rows % GROUP * 2).to(tl.int64) * strides", HEADS),
    ("next column of the table", "numbers + positions // BLOCK_SIZE",
     "numbers + positions // BLOCK_SIZE + 1", replace(DECODE, block_size=5)),
    ("place in a page that does not divide the tile", "return blocks, positions % BLOCK_SIZE",
     "return blocks, tl.arange(0, BLOCK_N) % BLOCK_SIZE", replace(DECODE, block_size=5)),
    ("second tile of a page", "return block, first % BLOCK_SIZE", "return block, first * 0",
     replace(DECODE, block_size=64)),
    ("table read behind its end", "mask=needed, other=0)", "mask=positions >= 0, other=0)",
     replace(DECODE, sequences=((1, 37),), block_size=3)),
    ("decode rows beside chunks left out", "if few:", "if max_query_len == few:", CHUNKS),
    ("nobody takes a single chunk", "        few = 0  # nothing to decode", "        return out",
     replace(CHUNKS, sequences=((40, 80),))),
    ("rows of the first tile again", "- query_len + row", "- query_len", LATER),
    ("tile of a wrong sequence", "// BLOCK_Q + middle", "// BLOCK_Q", LATER),
    ("too few tiles", "call.q.shape[0] // block_q + call.num_sequences\n",
     "call.q.shape[0] // block_q\n", LATER),
    # Several queries of a sequence.
    ("a query does not see itself", SEEN, SEEN.replace("<=", "<"), SEVERAL),
    ("a query sees the next one", SEEN, SEEN.replace("own", "own + 1"), SEVERAL),
    ("all queries see what the last one does", SEEN, "pass", SEVERAL),
    ("a query's window is too wide", WINDOW, WINDOW.replace(">", ">="), WINDOWS),
    ("the first query's window for all", WINDOW, "pass", WINDOWS),
    ("the last query's window for all", "low = tl.maximum(first_position + 1 - window",
     "low = tl.maximum(first_position + count - window", WINDOWS),
    ("a query of the group next door", "position = first_position + tl.arange(0, BLOCK_M) // GROUP",
     "position = first_position + tl.arange(0, BLOCK_M) % GROUP", SEVERAL),
    ("heads for queries", "tokens = row.to(tl.int64) + rows // GROUP",
     "tokens = row.to(tl.int64) + rows % GROUP", SEVERAL),
    ("the first query's results for all", "(row.to(tl.int64) + rows // GROUP) * out_strides[0]",
     "(row.to(tl.int64) + rows * 0) * out_strides[0]", replace(SEVERAL, splits=1)),
    ("parts of all queries in one place", "token = row.to(tl.int64) + rows // GROUP",
     "token = row.to(tl.int64) + rows * 0", SEVERAL),
    ("diagonal of several without a mask", "tl.maximum(first_position + 1, 0) // BLOCK_N), begin)",
     "tl.maximum(high, 0) // BLOCK_N), begin)", replace(SEVERAL, sequences=((5, 64),))),
    ("less nothing from nothing", "finite = tl.where(new_m == float(\"-inf\"), 0.0, new_m)\n"
     "        p = tl.exp2(tl.fma(scores, factor, -tl.expand", "finite = new_m\n"
     "        p = tl.exp2(tl.fma(scores, factor, -tl.expand",
     replace(SEVERAL, sequences=((5, 66), (3, 70)), splits=4)),
    ("splits of one query's window", "seq_len, window + query_len - 1, num_splits, BLOCK_N, 0",
     "seq_len, window, num_splits, BLOCK_N, 0", replace(WINDOWS, sequences=((5, 84), (3, 70)))),
    ("another cut where parts are combined",
     "(\n        seq_len, window + query_len - 1, num_splits, BLOCK_N, SPLIT_TILES",
     "(\n        seq_len, window, num_splits, BLOCK_N, SPLIT_TILES",
     replace(APART, sequences=((5, 125), (3, 70)), window=60)),
    ("the first tile's queries again", "sequence % tiles * BLOCK_Q", "sequence % tiles * 0", TILES),
    ("a tile too few", "num_tiles = call.num_sequences * -(-few // block_q)",
     "num_tiles = call.num_sequences", TILES),
    ("the first query's result for all", "out + (first_row + query) * out_strides",
     "out + first_row * out_strides", APART),
    ("queries that are not there are written", "(query >= query_len) | (query_len > few)",
     "query_len > few", replace(APART, padding=2)),
    ("several: a sequence's parts in its neighbour's place", "arrivals, sequence * few + row",
     "arrivals, sequence + row", replace(SEVERAL, sequences=((5, 137), (3, 150)))),
    ("several: splits begin where one row's do", "used = splits_of(\n            seq_len, window + "
     "query_len - 1,", "used = splits_of(\n            seq_len, window,",
     replace(APART, sequences=((5, 150), (5, 84)), window=20)),
    ("nothing seen", "tl.where(total == 0.0, 1.0, total)", "total", Case(((1, 0),), 2, 1)),
    ("padding not cleared", "// block_q + call.num_sequences + 1",
     "// block_q + call.num_sequences", replace(INVARIANT, sequences=((16, 20),), padding=17)),
    ("a path in order", "tail_start + order, positions", "positions, positions", TREE),
    ("a tail begins early", "later = positions - tail_start", "later = positions - tail_start + 1",
     TREE),
    ("the first path for all", "tail_order + sequence.to(tl.int64) * tail_stride", "tail_order",
     TREE),
    ("a tile of a path in one page", "BLOCK_SIZE % BLOCK_N == 0 and tail is None",
     "BLOCK_SIZE % BLOCK_N == 0", replace(TREE, block_size=64)),
    ("soft cap in other units", "self.soft_cap * LOG2_E, window", "self.soft_cap, window",
     Case(((1, 20),), 2, 1, soft_cap=2.0)),
)  # fmt: skip


@pytest.mark.mutation
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN, where the bug lets it through
@pytest.mark.parametrize(
    ("old", "new", "case"), [bug[1:] for bug in BUGS], ids=[bug[0] for bug in BUGS]
)
def test_bug_is_found(old: str, new: str, case: Case, tmp_path: Path) -> None:
    broken = mutant(FILES, old, new, tmp_path)
    with programs_in("by splits"):  # so that a part in a wrong place meets the one that is there
        assert convicted(verify, [case, case], broken)
