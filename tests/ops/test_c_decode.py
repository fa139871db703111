"""Decode attention in C against float64, on every path that this processor can run, with one query
per sequence and with several: whose bits are those of each query alone."""

import random
import threading
from ctypes import c_int64
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from minillm.ops import c_library, cpu
from tests.ops.c_variants import ELEMENTS, Guarded, built, with_threads
from tests.ops.test_c_prefill import TOLERANCE as WRAPPED  # what prefill.c may be wrong by, too
from tests.ops.test_c_prefill import Batch, bounds, make_batch
from tests.pairs import cases

NAN = float("nan")
TOLERANCE = {
    torch.bfloat16: {"atol": 0.004, "rtol": 0.006},
    torch.float32: {"atol": 2e-6, "rtol": 1e-6},
}


@pytest.fixture(scope="module", params=ELEMENTS)
def attend(request, path):
    return Attend(built(path, request.param), ELEMENTS[request.param])


class Attend:
    """Calls the C function with a batch and a band around its output."""

    def __init__(self, found: c_library.Library, dtype: torch.dtype):
        self.functions, self.dtype = found, dtype

    def status(self, batch: Batch, out: Tensor) -> int:
        q, k, v, tables = batch.q, batch.k_cache, batch.v_cache, batch.block_tables
        return self.functions.decode_attention(
            q.data_ptr(), k.data_ptr(), v.data_ptr(),
            (c_int64 * 6)(*k.stride()[:3], *v.stride()[:3]), k.shape[2],
            batch.query_start.data_ptr(), batch.seq_lens.data_ptr(), tables.data_ptr(),
            tables.stride(0), batch.scale, batch.window or 0, out.data_ptr(),
            len(batch.seq_lens), q.shape[1], k.shape[1], q.shape[2], v.shape[3],
            len(q), len(k), tables.shape[1], None,
        )  # fmt: skip

    def __call__(self, batch: Batch) -> Tensor:
        out = Guarded((len(batch.q), batch.q.shape[1], batch.v_cache.shape[3]), batch.q.dtype)
        assert self.status(batch, out.inside) == 0
        return out.checked()

    def most(self, group: int) -> int:
        """Queries of a sequence that the function takes."""
        return self.functions.decode_queries(group)

    def alone(self, batch: Batch) -> Tensor:
        """Each query of a batch in a call of its own."""
        starts, lengths = batch.query_start.tolist(), batch.seq_lens.tolist()
        rows = []
        for b, (begin, end) in enumerate(pairwise(starts)):
            for row in range(begin, end):
                length = max(lengths[b] - (end - 1 - row), 0)
                one = replace(
                    batch, q=batch.q[row : row + 1], query_start=bounds([1]),
                    seq_lens=torch.tensor([length], dtype=torch.int32),
                    block_tables=batch.block_tables[b : b + 1],
                )  # fmt: skip
                rows.append(self(one))
        return torch.cat(rows)

    def check(self, batch: Batch) -> None:
        got = self(batch).double()
        torch.testing.assert_close(got, batch.expected(), **TOLERANCE[self.dtype])


def decode_batch(dtype: torch.dtype, lengths: list[int], **options) -> Batch:
    return make_batch(dtype, lengths, [1] * len(lengths), **options)


def random_batch(dtype: torch.dtype, seed: int) -> Batch:
    choose = random.Random(seed)
    lengths = [
        choose.choice([1, 2, 15, 16, 17, 63, 64, 65, 128, 129, choose.randrange(1, 900)])
        for _ in range(choose.choice([1, 2, 5]))
    ]
    return decode_batch(
        dtype,
        lengths,
        kv_heads=choose.choice([1, 2, 3]),
        group=choose.randrange(1, 21),
        d=choose.choice([16, 32, 48, 64, 80, 96, 128, 256]),
        dv=choose.choice([None, None, 16, 80]),
        block_size=choose.choice([1, 3, 16, 17, 32, 64, 100, 1024]),
        window=choose.choice([None, None, 1, 7, 64, 100, 1000]),
        seed=seed,
    )


@cases("seed", range(12))
def test_it_is_attention(attend, seed):
    attend.check(random_batch(attend.dtype, seed))


@cases("group", range(1, 21))
def test_every_number_of_query_heads(attend, group):
    attend.check(decode_batch(attend.dtype, [70, 5], group=group, d=48, kv_heads=1))


@cases("length", [1, 15, 16, 17, 63, 64, 65, 79, 80, 81, 127, 128, 129, 192])
def test_lengths_around_vectors_and_tiles(attend, length):
    for block_size in (1, 16, 20, 256):
        attend.check(decode_batch(attend.dtype, [length], d=16, block_size=block_size))


@cases("dims", [(576, 512), (48, 32), (32, 16)])
def test_values_may_be_a_part_of_the_keys(attend, dims):
    attend.check(decode_batch(attend.dtype, [150, 9], kv_heads=1, group=16, d=dims[0],
                              dv=dims[1], mla=True))  # fmt: skip


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("window", [None, 600])
def test_few_heads_and_long_sequences_are_divided(attend, window, threads):
    """Parts of a sequence, of which a short one beside it has none."""
    with with_threads(attend.functions, threads):
        batch = decode_batch(
            attend.dtype, [1500, 1, 3], kv_heads=1, group=5, d=32, window=window, block_size=64
        )
        batch.k_cache.mul_(2)  # steeper, so that maxima differ from part to part
        attend.check(batch)


# ---- several queries of a sequence --------------------------------------------------------------


def several(dtype: torch.dtype, seed: int, most: int) -> Batch:
    """Sequences with 1 to `most` queries, around the edges of tiles and parts."""
    choose = random.Random(seed)
    group = choose.choice([group for group in (1, 2, 3, 4, 5, 8) if group * most <= 16])
    near = choose.choice([16, 64, 128, 1024])
    lengths = [
        choose.choice([near - 1, near, near + 1, near + 5, choose.randrange(1, 1700)])
        for _ in range(choose.choice([1, 2, 5]))
    ]
    return make_batch(
        dtype,
        lengths,
        [min(choose.randrange(1, most + 1), length) for length in lengths],
        kv_heads=choose.choice([1, 2]),
        group=group,
        d=choose.choice([16, 32, 48, 64, 96, 128]),
        dv=choose.choice([None, None, 16, 80]),
        block_size=choose.choice([1, 16, 17, 64, 256]),
        window=choose.choice([None, None, 1, 7, 64, 100, 1000]),
        seed=seed,
    )


@cases("most", [2, 5, 16])
@cases("seed", range(8))
def test_several_queries_are_attention_and_each_what_it_is_alone(attend, seed, most):
    batch = several(attend.dtype, seed, most)
    attend.check(batch)
    assert torch.equal(attend(batch), attend.alone(batch))


@cases("window", [None, 100])
@cases("length", [40, 130, 700, 1029, 2100])
def test_bits_know_nothing_of_threads_queries_and_neighbours(attend, length, window):
    """Alone, among five, and in a batch so large that no sequence is divided."""
    counts = [5, *[1, 2, 3] * 6]
    lengths = [length, *range(3, 21)]
    batch = make_batch(attend.dtype, lengths, counts, kv_heads=2, group=3, window=window)
    batch.k_cache.mul_(2)  # steeper, so that maxima differ from part to part
    with with_threads(attend.functions, 1):
        attend.check(batch)
        wanted = attend.alone(batch)
        assert torch.equal(attend(batch), wanted)
    with with_threads(attend.functions, 3):
        assert torch.equal(attend(batch), wanted)
        first = replace(
            batch, q=batch.q[:5], query_start=bounds([5]), seq_lens=batch.seq_lens[:1],
            block_tables=batch.block_tables[:1],
        )  # fmt: skip
        assert torch.equal(attend(first), wanted[:5])


def test_a_query_before_the_first_position_is_zero(attend):
    """As the rows of a captured step that are not used."""
    batch = make_batch(attend.dtype, [20, 9, 300], [4, 5, 5], group=2)
    batch.seq_lens[1] = 2
    got = attend(batch)
    assert got[4:7].eq(0).all()
    assert not got.isnan().any()
    assert torch.equal(got, attend.alone(batch))


def test_how_many_queries_are_taken(attend):
    taken = [attend.most(group) for group in (1, 2, 3, 4, 8, 9, 256)]
    floats = attend.dtype == torch.float32
    assert taken == ([16, 12, 8, 6, 3, 2, 1] if floats else [16, 8, 5, 4, 2, 1, 1])
    for group in (1, 3, 16):
        most = attend.most(group)
        batch = make_batch(attend.dtype, [50, 60], [most, most + 1], group=group)
        got = attend(batch)
        assert not got[:most].isnan().any()
        assert got[most:].isnan().all()


@pytest.mark.parametrize("count", [2, 5, 9])
@pytest.mark.parametrize("dtype", ELEMENTS.values())
def test_the_wrapper_chooses(dtype, count):
    """By the number of queries: five of groups of 3 are decoded, nine are a prompt's part."""
    batch = make_batch(dtype, [50, 90, 33], [1, count, 33], group=3)
    if not cpu.takes_attention(batch.q, batch.k_cache, batch.v_cache):
        pytest.skip(cpu.describe(dtype))
    found = cpu.functions(dtype)
    assert found is not None
    got = wrapped(batch)
    torch.testing.assert_close(got.double(), batch.expected(), **WRAPPED[dtype])
    decoded = Attend(found, dtype)(batch)
    few = count <= found.decode_queries(3)
    assert torch.equal(got[: 1 + count], decoded[: 1 + count]) == few
    without = make_batch(dtype, [50, 90], [1, count], group=3)  # nothing is a prompt's part, if few
    torch.testing.assert_close(wrapped(without).double(), without.expected(), **WRAPPED[dtype])


@cases("window", [1, 2, 16, 17, 63, 64, 65, 199, 200, 201])
def test_windows(attend, window):
    attend.check(decode_batch(attend.dtype, [200, 64, 1], d=32, window=window))


def test_the_maximum_is_carried_from_tile_to_tile(attend):
    """Scores that rise, fall, and differ by far more than exp can tell from 0. They are whole
    numbers, which both sides compute exactly. With many sequences none is divided."""
    rising = (torch.linspace(0, 8, 256) * 16).round() / 16
    for factors in (rising, rising.flip(0), rising[torch.arange(256) * 77 % 256]):
        lengths = [256] + [1] * 63
        batch = decode_batch(attend.dtype, lengths, kv_heads=1, group=2, d=16, block_size=256)
        batch.q.fill_(16)
        page = batch.k_cache[batch.block_tables[0, 0], 0]
        page.copy_(factors[:, None].to(attend.dtype).expand(256, 16))
        attend.check(batch)


def test_nan_reaches_the_heads_that_see_it_and_no_others(attend):
    for where in ("k_cache", "v_cache"):
        batch = decode_batch(attend.dtype, [150, 150], group=2, block_size=64, window=100)
        getattr(batch, where)[batch.block_tables[0, 1], 1, 7] = NAN  # position 71 of head 1
        getattr(batch, where)[batch.block_tables[1, 0], 0, 49] = NAN  # before the window
        got = attend(batch)
        assert got[0, 2:].isnan().all()
        assert not got[0, :2].isnan().any()
        assert not got[1].isnan().any()


def test_a_tile_of_scores_of_minus_infinity_weighs_nothing(attend):
    batch = decode_batch(attend.dtype, [160], kv_heads=1, group=1, d=16, block_size=256)
    batch.q.fill_(1)
    page = batch.k_cache[batch.block_tables[0, 0], 0]
    page[:64] = -3e38
    got = attend(batch).double()
    page[:64] = -1e4  # weighs nothing, either
    torch.testing.assert_close(got, batch.expected(), **TOLERANCE[attend.dtype])


def test_rows_of_length_zero_are_zero(attend):
    batch = decode_batch(attend.dtype, [20, 5, 400], kv_heads=1)
    batch.seq_lens[1] = 0
    batch.block_tables[1] = -(2**40)
    got = attend(batch)
    assert got[1].eq(0).all()
    assert not got.isnan().any()


def test_sequences_with_other_numbers_of_queries_are_left_alone(attend):
    batch = make_batch(attend.dtype, [50, 60, 7, 70], [1, 9, 0, 1])
    got = attend(batch)
    assert got[1:10].isnan().all()
    assert not got[[0, 10]].isnan().any()


def wrapped(batch: Batch) -> Tensor:
    return cpu.paged_attention(batch.q, *batch.places(), batch.scale)


def test_the_first_columns_of_a_wide_table():
    """Rows of a larger table, as the runner keeps one."""
    batch = decode_batch(torch.float32, [40, 50, 3])
    due, tables = wrapped(batch), batch.block_tables
    wide = torch.cat((tables, torch.full_like(tables, 2**40)), 1)
    batch.block_tables = wide[:, : tables.shape[1]]
    assert torch.equal(wrapped(batch), due)


def set_(name: str, index: tuple[int, ...], value: int):
    def change(batch: Batch) -> None:
        getattr(batch, name)[index] = value

    return change


WRONG = {
    "a negative block": set_("block_tables", (0, 1), -1),
    "a block behind the last": set_("block_tables", (1, 0), 9),
    "a very large block": set_("block_tables", (0, 0), 2**62),
    "a negative length": set_("seq_lens", (0,), -1),
    "a sequence longer than its table": set_("seq_lens", (1,), 65),
    "the longest sequence there is": set_("seq_lens", (1,), 2**31 - 1),
    "rows behind the last": set_("query_start", (2,), 3),
    "rows before the first": set_("query_start", (0,), -1),
    "rows backwards": set_("query_start", (1,), 3),
}


@cases("what", WRONG)
def test_what_points_outside_is_refused_and_nothing_is_written(attend, what):
    batch = decode_batch(attend.dtype, [40, 50])
    assert len(batch.k_cache) == 9
    WRONG[what](batch)
    out = Guarded((2, 6, 64), attend.dtype, 7.0)
    assert attend.status(batch, out.inside) == 2
    assert out.checked().eq(7).all()


@pytest.mark.parametrize("what", WRONG)
def test_the_wrapper_raises(what):
    batch = decode_batch(torch.float32, [40, 50])
    if not cpu.takes_attention(batch.q, batch.k_cache, batch.v_cache):
        pytest.skip(cpu.describe(torch.float32))
    WRONG[what](batch)
    with pytest.raises(IndexError, match="block_tables or query_start point outside the cache"):
        wrapped(batch)


@pytest.mark.parametrize("dims", [(256, 16, 16), (256, 64, 512), (128, 576, 512), (1, 4096, 4096)])
def test_the_largest_heads_fit_a_thread_s_stack(dims):
    """macOS gives a thread 512 KiB; what is above the limit goes to torch."""
    group, d, dv = dims
    batch = decode_batch(torch.float32, [70], kv_heads=1, group=group, d=d, dv=dv)
    if not cpu.takes_attention(batch.q, batch.k_cache, batch.v_cache):
        pytest.skip(cpu.describe(torch.float32))
    got: list[Tensor] = []
    before = threading.stack_size(256 * 1024)
    try:
        thread = threading.Thread(target=lambda: got.append(wrapped(batch)))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    torch.testing.assert_close(got[0].double(), batch.expected(), atol=1e-5, rtol=1e-5)


def test_larger_heads_are_not_taken():
    for group, d, dv in ((257, 16, 16), (1, 4112, 16), (1, 16, 4112), (1, 24, 16), (1, 16, 8)):
        assert not cpu.fits_vectors(group, d, dv)
