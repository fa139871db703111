"""The C function for prompts against the definition in float64, on every path that the processor
and the compiler offer: tiles (real, or written in C), pairs of bf16, wide vectors, and plain C."""

import random
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minillm.ops import c_library, cpu
from minillm.ops.batch import Batch as FlatBatch
from minillm.ops.batch import Pages
from minillm_kernels import reference
from tests.ops.c_variants import ELEMENTS, PRODUCT_PATHS, built, parameters, with_threads
from tests.pairs import cases

TOLERANCE = {
    torch.bfloat16: {"atol": 0.012, "rtol": 0.008},
    torch.float32: {"atol": 3e-6, "rtol": 0},
}


@pytest.fixture(scope="module", params=parameters(*product(PRODUCT_PATHS, ELEMENTS)))
def attend(request):
    """The function, compiled for one path and one element type."""
    return Attend(built(*request.param), ELEMENTS[request.param[1]])


@dataclass
class Batch:
    """The arguments of paged attention. What no sequence uses is NaN, in pages and between them,
    and behind its end a block table points nowhere."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    scale: float
    window: int | None = None

    def expected(self) -> Tensor:
        q, k, v = (x.double() for x in (self.q, self.k_cache, self.v_cache))
        rest = self.query_start, self.seq_lens, self.block_tables, self.scale, self.window
        return reference.paged_attention(q, k, v, *rest)

    def places(self) -> tuple[Pages, FlatBatch]:
        """The same as the engine's operations take it; they read no other field."""
        unread, lengths = self.query_start[:0].long(), (self.query_start, self.seq_lens)
        longest = int(self.query_start.diff().max()) if len(self.seq_lens) else 0
        flat = FlatBatch(unread, unread, unread, *lengths, self.block_tables, unread, longest)
        return Pages(self.k_cache, self.v_cache), flat

    def last(self, counts: list[int]) -> "Batch":
        """The same sequences, of whose queries only the last `counts` are asked."""
        ends = self.query_start[1:].tolist()
        rows = [torch.arange(end - n, end) for end, n in zip(ends, counts, strict=True)]
        return replace(self, q=self.q[torch.cat(rows)], query_start=bounds(counts))

    def cut_at(self, counts: list[int]) -> "Batch":
        """The first `counts` positions of each sequence, and their queries; all were queried."""
        starts = self.query_start[:-1].tolist()
        rows = [torch.arange(at, at + n) for at, n in zip(starts, counts, strict=True)]
        lengths = torch.tensor(counts, dtype=torch.int32)
        q = self.q[torch.cat(rows)]
        return replace(self, q=q, query_start=bounds(counts), seq_lens=lengths)


class Attend:
    """Calls the C function with the arguments of a batch."""

    def __init__(self, built: c_library.Library, dtype: torch.dtype):
        p, n, function = c_void_p, c_int64, built.prefill_attention
        function.restype = n
        function.argtypes = (p, p, p, p, n, p, p, p, n, c_float, n, p, n, n, n, n, n, n)
        self.function, self.threads, self.dtype = function, built.threads, dtype

    def __call__(self, batch: Batch, fewest: int = 1, out: Tensor | None = None) -> Tensor:
        q, k, v, tables = batch.q, batch.k_cache, batch.v_cache, batch.block_tables
        count, heads, d = q.shape
        if out is None:
            out = q.new_full((count, heads, v.shape[-1]), float("nan"))
        status = self.function(
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            (c_int64 * 6)(*k.stride()[:3], *v.stride()[:3]),
            k.shape[2],
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            tables.data_ptr(),
            tables.stride(0),
            batch.scale,
            batch.window or 0,
            out.data_ptr(),
            len(batch.seq_lens),
            heads,
            k.shape[1],
            d,
            v.shape[-1],
            fewest,
        )
        assert status == 0
        return out

    def check(self, batch: Batch) -> None:
        got = self(batch).double()
        torch.testing.assert_close(got, batch.expected(), **TOLERANCE[self.dtype])


def bounds(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def make_batch(
    dtype: torch.dtype,
    lengths: list[int],
    counts: list[int] | None = None,
    kv_heads: int = 2,
    group: int = 3,
    d: int = 64,
    dv: int | None = None,
    block_size: int = 16,
    mla: bool = False,
    window: int | None = None,
    seed: int = 0,
) -> Batch:
    """Sequences of random numbers in pages in random order; `counts` queries, all by default."""
    generator = torch.Generator().manual_seed(seed)
    counts, dv = lengths if counts is None else counts, dv or d
    per_sequence = [-(-length // block_size) for length in lengths]
    num_blocks = sum(per_sequence) + 2
    order = torch.randperm(num_blocks, generator=generator)
    tables = torch.full((len(lengths), max(per_sequence) + 1), 2**40)
    shape = (num_blocks, kv_heads, block_size)
    keys = torch.randn(*shape, d, generator=generator).to(dtype)
    values = torch.randn(*shape, dv, generator=generator).to(dtype)
    used = torch.zeros(num_blocks, block_size, dtype=torch.bool)
    at = 0
    for row, (blocks, length) in enumerate(zip(per_sequence, lengths, strict=True)):
        tables[row, :blocks] = mine = order[at : at + blocks]
        at += blocks
        inside = torch.arange(blocks * block_size).view(blocks, block_size) < length
        used[mine] = inside
    for each in (keys, values):
        each.masked_fill_(~used[:, None, :, None], float("nan"))
    q = torch.randn(sum(counts), kv_heads * group, d, generator=generator).to(dtype)
    values = keys[..., :dv] if mla else values
    lens = torch.tensor(lengths, dtype=torch.int32)
    return Batch(q, keys, values, bounds(counts), lens, tables, d**-0.5, window)


def random_batch(dtype: torch.dtype, seed: int) -> Batch:
    """Prompts, parts of them, verification and single tokens, of all kinds of heads and pages."""
    choose = random.Random(seed)
    lengths = [
        choose.choice([1, 2, 16, 17, 64, 127, 128, 129, choose.randrange(1, 400)])
        for _ in range(choose.choice([1, 2, 4]))
    ]
    counts = [choose.choice([n, n, choose.randrange(n + 1), min(n, 5)]) for n in lengths]
    return make_batch(
        dtype,
        lengths,
        counts,
        kv_heads=choose.choice([1, 2, 3]),
        group=choose.choice([1, 3, 8]),
        d=choose.choice([16, 48, 64, 80, 96, 128, 256]),
        dv=choose.choice([None, None, 16, 80]),
        block_size=choose.choice([1, 16, 32, 64, 512]),
        window=choose.choice([None, None, 1, 7, 100, 129, 1000]),
        seed=seed,
    )


@cases("seed", range(10))
def test_it_is_attention(attend, seed):
    attend.check(random_batch(attend.dtype, seed))


@cases("dims", [(576, 512), (48, 32), (32, 16)])
def test_values_may_be_a_part_of_the_keys(attend, dims):
    batch = make_batch(attend.dtype, [150, 9], [20, 9], 1, 8, *dims, mla=True)
    assert batch.v_cache.stride(2) == dims[0]
    attend.check(batch)


def test_tasks_of_many_rows_are_cut(attend):
    """Long enough for several tasks per head and several tiles per task."""
    attend.check(make_batch(attend.dtype, [700, 40], kv_heads=1, group=8, d=32, block_size=64))


@cases("window", [None, 50])
def test_a_row_has_the_same_bits_however_its_prompt_is_cut(attend, window):
    lengths = [300, 140]
    batch = make_batch(attend.dtype, lengths, window=window)
    whole = attend(batch)
    for counts in ([1, 1], [3, 140], [172, 15]):
        rows = [torch.arange(end - n, end) for end, n in zip((300, 440), counts, strict=True)]
        assert torch.equal(attend(batch.last(counts)), whole[torch.cat(rows)])
    assert torch.equal(attend(batch.cut_at([129, 0])), whole[:129])
    assert torch.equal(attend(batch.cut_at([0, 31])), whole[300:331])


def test_a_row_has_the_same_bits_with_more_threads(attend):
    batch = make_batch(attend.dtype, [400, 9, 77])
    alone = attend(batch)
    for count in (2, 3, 4):
        with with_threads(attend, count):
            assert torch.equal(attend(batch), alone)


def test_large_scores_neither_overflow_nor_vanish(attend):
    """Steep softmaxes, whose maximum rises from tile to tile."""
    batch = make_batch(attend.dtype, [390], d=32)
    batch.q.mul_(8)
    batch.k_cache.mul_(16 * torch.linspace(0.5, 2, 16)[:, None].to(attend.dtype))
    got, expected = attend(batch).double(), batch.expected()
    limit = 0.03 if attend.dtype == torch.bfloat16 else 3e-4
    torch.testing.assert_close(got, expected, atol=limit, rtol=limit)


def test_nan_reaches_the_rows_that_see_it_and_no_others(attend):
    batch = make_batch(attend.dtype, [150], kv_heads=1, group=1, block_size=256, window=30)
    batch.k_cache[batch.block_tables[0, 0], 0, 70] = float("nan")
    bad = attend(batch).isnan().flatten(1)
    assert bad[70:100].all()
    assert not bad[:70].any()
    assert not bad[100:].any()


def test_sequences_with_fewer_queries_are_left_alone(attend):
    batch = make_batch(attend.dtype, [50, 60, 70], [1, 2, 5])
    out = batch.q.new_full((8, 6, 64), 7.0)
    attend(batch, fewest=2, out=out)
    assert out[0].eq(7).all()
    assert torch.equal(out[1:], attend(batch)[1:])


def test_rows_of_a_sequence_of_length_zero_are_zero(attend):
    batch = make_batch(attend.dtype, [20, 5, 20], [20, 2, 20])
    batch.seq_lens[1] = 0
    out = attend(batch)
    assert out[20:22].eq(0).all()
    assert not out.isnan().any()


def test_nothing_to_do(attend):
    assert attend(make_batch(attend.dtype, [9, 3], [0, 0])).numel() == 0


def test_torch_s_products_and_ours_do_not_disturb_each_other(attend):
    """Both may use the processor's tiles, which have a shape that somebody must set."""
    batch = make_batch(attend.dtype, [130])
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)).to(attend.dtype)
    ours, theirs = attend(batch), x @ x.T
    for _ in range(3):
        assert torch.equal(attend(batch), ours)
        assert torch.equal(x @ x.T, theirs)


@pytest.mark.parametrize("dtype", ELEMENTS.values())
def test_through_the_wrapper(dtype):
    """Prompts, a part of one, a decoded token: two C functions share the batch."""
    batch = make_batch(dtype, [33, 90, 1, 200], [33, 12, 1, 1], block_size=32)
    if not cpu.takes_attention(batch.q, batch.k_cache, batch.v_cache):
        pytest.skip(cpu.describe(dtype))
    got = cpu.paged_attention(batch.q, *batch.places(), batch.scale)
    torch.testing.assert_close(got.double(), batch.expected(), **TOLERANCE[dtype])
