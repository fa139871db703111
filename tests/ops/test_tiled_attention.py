"""Tiled attention is attention, and its bits know nothing of chunks, blocks and neighbours."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from minillm_kernels import batch_invariant
from minillm_kernels.batch_invariant import (
    QUERY_TILE,
    invariant_silu_mul,
    tiled_attention,
    tiled_moe_experts,
)
from minillm_kernels.reference import moe_experts, paged_attention
from tests.ops.c_variants import torch_threads
from tests.pairs import pairwise

# Around multiples of the tile and of SDPA's own key blocks of 512.
SHORT = (1, 2, 15, 16, 17, 31, 32, 33, 48, 100)
LENGTHS = (*SHORT, 511, 512, 513, 1040)
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Heads:
    """How many heads, and their size; with `value_dim` the value is the key's first part (MLA)."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int = 0


SHAPES = {
    "mha": Heads(2, 2, 16),
    "gqa": Heads(6, 2, 24),
    "mqa": Heads(4, 1, 16),
    "mla": Heads(4, 1, 40, 32),
}


class Sequences:
    """Sequences with random queries, keys and values, in a cache whose other places are NaN."""

    def __init__(
        self, lengths: Sequence[int], heads: Heads, dtype: torch.dtype, block_size: int = 8
    ):
        self.lengths, self.heads, self.block_size = lengths, heads, block_size
        random = torch.Generator().manual_seed(sum(lengths))
        self.queries = [self._rows(n, heads.num_heads, random).to(dtype) for n in lengths]
        self.keys = [self._rows(n, heads.num_kv_heads, random).to(dtype) for n in lengths]
        self.values = [self._rows(n, heads.num_kv_heads, random).to(dtype) for n in lengths]
        if heads.value_dim:
            self.values = [keys[..., : heads.value_dim] for keys in self.keys]

    def _rows(self, length: int, num_heads: int, random: torch.Generator) -> Tensor:
        return torch.randn(length, num_heads, self.heads.key_dim, generator=random)

    def attend(self, parts: Sequence[tuple[int, int, int]], window: int | None, op=tiled_attention):
        """Attention of (sequence, start, end) in one call. Nothing behind an `end` is written."""
        size, most = self.block_size, max(-(-end // self.block_size) for *_, end in parts)
        tables = torch.randperm(len(parts) * most + 2, generator=torch.Generator().manual_seed(1))
        tables = tables[: len(parts) * most].view(len(parts), most)
        shape = (len(parts) * most + 2, self.heads.num_kv_heads, size, self.heads.key_dim)
        like = self.queries[0]
        key = torch.full(shape, torch.nan, dtype=like.dtype)
        value = key[..., : self.heads.value_dim] if self.heads.value_dim else key.clone()
        for table, (sequence, _, end) in zip(tables, parts, strict=True):
            positions = torch.arange(end)
            place = table[positions // size], slice(None), positions % size
            key[place], value[place] = self.keys[sequence][:end], self.values[sequence][:end]
        bounds = torch.tensor([0, *(end - start for _, start, end in parts)]).cumsum(0)
        ends = torch.tensor([end for *_, end in parts])
        query = torch.cat([self.queries[s][start:end] for s, start, end in parts])
        return op(query, key, value, bounds.int(), ends.int(), tables, 0.3, window)

    def exact(self, sequence: int, window: int | None) -> Tensor:
        """The same in float64, by the formula."""
        group = self.heads.num_heads // self.heads.num_kv_heads
        q = self.queries[sequence].double()
        k, v = (
            each[sequence].double().repeat_interleave(group, 1) for each in (self.keys, self.values)
        )
        place = torch.arange(len(q))
        distance = place[:, None] - place
        hidden = (distance < 0) | (distance >= (window or len(q)))
        scores = torch.einsum("qhd,khd->hqk", q, k) * 0.3
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)

    def whole(self, sequence: int) -> tuple[int, int, int]:
        """All of a sequence."""
        return sequence, 0, self.lengths[sequence]


@pytest.mark.parametrize(
    ("shape", "window", "dtype"), pairwise([*SHAPES], [None, 1, 5, 20, 600], [*TOLERANCE])
)
def test_it_is_attention(shape, window, dtype):
    lengths = LENGTHS if window in (20, 600) else SHORT
    made = Sequences(lengths, SHAPES[shape], dtype)
    got = made.attend([made.whole(i) for i in range(len(lengths))], window).split(lengths)
    for sequence, result in enumerate(got):
        error = (result.double() - made.exact(sequence, window)).abs().max()
        assert error < TOLERANCE[dtype], lengths[sequence]


def in_chunks(made: Sequences, chunk: int, window: int | None) -> Tensor:
    """The first sequence, `chunk` queries at a time."""
    length = made.lengths[0]
    starts = range(0, length, chunk)
    return torch.cat([made.attend([(0, s, min(s + chunk, length))], window) for s in starts])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("shape", ["gqa", "mla"])
def test_chunks_change_no_bit(shape, window, dtype):
    made = Sequences([75], SHAPES[shape], dtype)
    whole = made.attend([made.whole(0)], window)
    for chunk in (1, 7, QUERY_TILE, 64):
        assert torch.equal(in_chunks(made, chunk, window), whole), chunk


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_chunks_change_no_bit_of_a_long_sequence(window, dtype):
    made = Sequences([1040], SHAPES["gqa"], dtype)
    whole = made.attend([made.whole(0)], window)
    ends = (1, 15, 16, 17, 31, 256, 257, 511, 512, 513, 600, 1023, 1024, 1025, 1040)
    for end in ends:
        for length in (1, 7, 70):
            start = max(0, end - length)
            assert torch.equal(made.attend([(0, start, end)], window), whole[start:end]), end


def test_neighbours_change_no_bit():
    made = Sequences([33, 100, 5, 64], SHAPES["gqa"], torch.float32)
    parts = [(0, 30, 33), (1, 0, 100), (2, 4, 5), (3, 16, 64)]
    together = made.attend(parts, None).split([end - start for _, start, end in parts])
    for part, result in zip(parts, together, strict=True):
        assert torch.equal(made.attend([part], None), result)


def test_rows_behind_the_last_sequence_are_copies_of_the_last_row():
    made = Sequences([20], SHAPES["gqa"], torch.float32)

    def with_padding(query, *others):
        return tiled_attention(torch.cat([query, torch.full_like(query[:3], torch.nan)]), *others)

    out = made.attend([(0, 15, 20)], None, with_padding)
    assert torch.equal(out[:5], made.attend([(0, 15, 20)], None))
    assert torch.equal(out[5:], out[4].expand(3, -1, -1))


def test_the_usual_attention_depends_on_chunks():
    """Else these tests would show nothing."""
    assert not is_as_in_chunks(paged_attention)


# ---- planted bugs -----------------------------------------------------------------------------

BUGS = {
    "tiles begin where the chunk begins": (
        "range(begin // QUERY_TILE * QUERY_TILE, end, QUERY_TILE)",
        "range(begin, end, QUERY_TILE)",
    ),
    "keys end where the chunk ends": (
        "tile + QUERY_TILE - first)\n",
        "min(tile + QUERY_TILE, end) - first)\n",
    ),
    "all keys of the chunk": ("slice(first_key(tile, window) - first,", "slice(0,"),
}


def planted(bug: str):
    """`tiled_attention` with one line changed."""
    old, new = BUGS[bug]
    source = inspect.getsource(tiled_attention)
    assert old in source
    names = dict(vars(batch_invariant))
    exec(source.replace(old, new), names)
    return names["tiled_attention"]


def is_as_in_chunks(op) -> bool:
    """Whether an operation gives the bits and the values that it should."""
    for length, window in ((75, None), (75, 20), (700, 100)):
        made = Sequences([length], SHAPES["gqa"], torch.float32)
        whole = made.attend([made.whole(0)], window, op)
        if not (whole.double() - made.exact(0, window)).abs().max() < TOLERANCE[torch.float32]:
            return False
        for start, end in ((length - 1, length), (61, 75), (16, 64), (7, 14), (530, 560)):
            if end > length:
                continue
            try:
                part = made.attend([(0, start, end)], window, op)
            except RuntimeError:
                return False
            if not torch.equal(part, whole[start:end]):
                return False
    return True


@pytest.mark.mutation
def test_what_is_behind_the_end_must_be_zero(monkeypatch):
    """It is NaN in the test's cache, and so would be what comes out."""
    source = inspect.getsource(batch_invariant.gather_positions)
    assert "[:, end - first :] = 0" in source
    names = dict(vars(batch_invariant))
    exec(source.replace("[:, end - first :] = 0", "[:, :0] = 0"), names)
    monkeypatch.setattr(batch_invariant, "gather_positions", names["gather_positions"])
    assert not is_as_in_chunks(tiled_attention)


@pytest.mark.mutation
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug):
    assert is_as_in_chunks(tiled_attention)
    assert not is_as_in_chunks(planted(bug))


# ---- the activation ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2, 3, 5])
def test_equal_rows_are_activated_equally(num_threads, dtype):
    """1000 and 14336 numbers a row are cut within a row by 3 or 5 threads; 9 is no full vector."""
    for size in (9, 1000, 14336):
        x = torch.randn(1, 2 * size, generator=torch.Generator().manual_seed(0)).to(dtype) * 3
        with torch_threads(num_threads):
            alone = invariant_silu_mul(x)
            for num_rows in (8, 16, 128):
                out = invariant_silu_mul(x.repeat(num_rows, 1))
                assert torch.equal(out, alone.expand_as(out))


# ---- experts ----------------------------------------------------------------------------------


def routed(num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Rows with 3 of 8 experts each."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 24, generator=random).to(dtype)
    gate_up = torch.randn(8, 2 * 20, 24, generator=random).to(dtype)
    down = torch.randn(8, 24, 20, generator=random).to(dtype)
    scores = torch.rand(num_rows, 8, generator=random)
    weights, ids = scores.topk(3, dim=-1)
    return x, gate_up, down, weights, ids


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_tiled_experts_compute_what_experts_compute(dtype, tolerance):
    arguments = routed(16, dtype)
    one, other = tiled_moe_experts(*arguments), moe_experts(*arguments)
    assert torch.allclose(one.float(), other.float(), rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_choices_of_other_rows_change_no_bit_of_a_row(dtype):
    x, gate_up, down, weights, ids = routed(16, dtype)
    together = tiled_moe_experts(x, gate_up, down, weights, ids)
    for row in range(16):
        others = (ids + 3) % 8
        others[row] = ids[row]
        changed = torch.full_like(x, torch.nan)
        changed[row] = x[row]
        got = tiled_moe_experts(changed, gate_up, down, weights, others)
        assert torch.equal(got[row], together[row])
