"""A KV cache of 8 bits: the error of every element is within its bound, and the bits of a query
depend on nothing but its position. In plain torch, which defines them, and in C."""

import math
import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from minillm import ops
from minillm.ops.batch import Batch, Pages
from minillm_kernels import int8_cache, reference

TILE = 64
SIZES = {  # the dimensions of heads, tokens of a block, query heads of a KV head
    "usual": ((32, 64, 128), (16, 32), (1, 2, 3, 4)),
    "odd": ((16, 48, 80, 256), (4, 12, 64, 256), (1, 5, 8)),
}


@dataclass(frozen=True)
class Case:
    """Sequences with the last `counts` positions as queries, in pages whose other slots are
    garbage, with NaN as scales. `way` is the mode of operations: "plain" torch, or C if it can."""

    q: Tensor  # [N, H, D]
    keys: list[Tensor]  # of each sequence [S, Hkv, D], before they are rounded
    values: list[Tensor]
    counts: list[int]
    pages: Pages
    tables: Tensor
    scale: float
    window: int | None
    way: str = "plain"

    @property
    def lengths(self) -> list[int]:
        return [len(key) for key in self.keys]

    def batch(self, counts: list[int], lengths: list[int], rows: list[int]) -> Batch:
        none = torch.empty(0, dtype=torch.int64)
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        return Batch(none, none, none, starts, torch.tensor(lengths).int(), self.tables[rows],
                     none, max(counts))  # fmt: skip

    def attend(self, **changed: object) -> Tensor:
        """The output [N, H, D]."""
        batch = self.batch(self.counts, self.lengths, list(range(len(self.counts))))
        return ops.paged_attention(self.q, self.pages, replace(batch, **changed), self.scale,
                                   self.window, self.way)  # fmt: skip

    def one_by_one(self) -> Tensor:
        """The same, each query in a call of its own, as in decode."""
        found, at = [], 0
        for row, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            for i in range(count):
                batch = self.batch([1], [length - count + 1 + i], [row])
                found.append(ops.paged_attention(self.q[at : at + 1], self.pages, batch,
                                                 self.scale, self.window, self.way))  # fmt: skip
                at += 1
        return torch.cat(found)


def make_case(
    seed: int,
    lengths: list[int],
    counts: list[int],
    dim: int = 64,
    block_size: int = 16,
    group: int = 2,
    kv_heads: int = 2,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    way: str = "plain",
    steep: float = 1.0,
) -> Case:
    dice = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=dice).to(dtype)

    columns = -(-max(lengths) // block_size)
    num_blocks = columns * len(lengths) + 3
    shape = num_blocks, kv_heads, block_size, dim
    codes = torch.randint(0, 256, shape, generator=dice)
    unused = torch.full(shape[:3], math.nan, dtype=torch.float16)
    pages = Pages(codes.byte(), codes.sub(128).to(torch.int8), unused, unused.clone())
    tables = torch.randperm(num_blocks, generator=dice)[: columns * len(lengths)]
    tables = tables.view(len(lengths), columns)
    keys, values = [], []
    for row, length in enumerate(lengths):
        at = torch.arange(length)
        slots = tables[row][at // block_size] * block_size + at % block_size
        keys.append(draw(length, kv_heads, dim) * draw(length, kv_heads, 1).exp())
        values.append(draw(length, kv_heads, dim) * draw(length, kv_heads, 1).exp())
        values[-1][torch.rand(length, generator=dice) < 0.1] = 0  # rows of zeros
        slots, key, value = slots.flip(0), keys[-1].flip(0), values[-1].flip(0)
        ops.write_cache(key, value, pages, slots)
    q = draw(sum(counts), kv_heads * group, dim) * steep
    return Case(q, keys, values, counts, pages, tables, dim**-0.5, window, way)


def random_case(seed: int, sizes: str, dtype: torch.dtype, way: str) -> Case:
    choose = random.Random(seed)
    dims, blocks, groups = SIZES[sizes]
    lengths = [choose.choice([1, 3, 63, 64, 65, 128, 130, choose.randrange(1, 400)])
               for _ in range(choose.choice([1, 3]))]  # fmt: skip
    return make_case(
        seed, lengths, [choose.choice([1, 1, 5, each]) if each > 5 else 1 for each in lengths],
        choose.choice(dims), choose.choice(blocks), choose.choice(groups), choose.choice([1, 2, 3]),
        choose.choice([None, None, 1, 7, 64, 100]), dtype, way, choose.choice([0.3, 1.0, 3.0]),
    )  # fmt: skip


def dequantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The codes, scales and values of rows, in float64."""
    codes, scale = int8_cache.quantize(x)
    return codes.double(), scale.double(), codes.double() * scale.double().unsqueeze(-1)


def check_bounds(case: Case) -> None:
    """Each element against float64: first with the rounded numbers, then with the original ones."""
    got, at = case.attend().double(), 0
    epsilon = 1e-5 if case.q.dtype == torch.float32 else 2**-8
    for row, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        q = case.q[at : at + count].double()
        group = q.shape[1] // case.keys[row].shape[1]
        codes_q, scale_q = int8_cache.quantize_query(case.q[at : at + count])
        near_q = codes_q.double() * scale_q.double().unsqueeze(-1)
        key, value = (x[row].double() for x in (case.keys, case.values))
        _, scale_k, near_k = dequantized(case.keys[row])
        codes_v, scale_v, near_v = dequantized(case.values[row])

        def heads(x: Tensor, group: int = group) -> Tensor:
            return x.repeat_interleave(group, 1)  # [S, H, ..]

        visible = reference.visible_positions(count, length, case.window, q.device)
        scores, rounded = (
            torch.einsum("thd,shd->hts", a, heads(b)).mul(case.scale).masked_fill(
                ~visible, -math.inf
            )
            for a, b in ((q, key), (near_q, near_k))
        )  # fmt: skip
        exact, p = scores.softmax(-1), rounded.softmax(-1)
        # The weights of each tile are rounded to multiples of its W.
        scaled = p * heads(scale_v).T.unsqueeze(1)  # [H, T, S]
        error = torch.zeros(count, *q.shape[1:], dtype=torch.float64)
        for tile in range(0, length, TILE):
            part = slice(tile, tile + TILE)
            unit = scaled[..., part].amax(-1) / 127
            sums = torch.einsum(
                "ts,shd->thd", visible[:, part].double(), heads(codes_v[part]).abs()
            )
            error += unit.T.unsqueeze(-1) / 2 * sums
        wanted = torch.einsum("hts,shd->thd", p, heads(near_v))
        largest = heads(near_v).abs().amax((0, 2))[None, :, None]
        assert ((got[at : at + count] - wanted).abs() <= error + epsilon * (largest + 1)).all()
        # Score: half a step of the key for each |q|, half a step of the query for each |k|.
        off = scale_k.T.unsqueeze(1).repeat_interleave(group, 0) / 2 * q.abs().sum(-1).T[..., None]
        off = off + (scale_q / 2).double().T[..., None] * heads(near_k.abs().sum(-1)).T.unsqueeze(1)
        off = off * case.scale * (1 + 2**-10)
        assert ((rounded - scores).abs() <= off).logical_or(~visible).all()
        most = off.masked_fill(~visible, 0).amax(-1).T.unsqueeze(-1)
        error = error + torch.einsum("hts,sh->th", p, heads(scale_v))[..., None] / 2
        error = error + ((2 * most).exp() - 1) * largest
        wanted = torch.einsum("hts,shd->thd", exact, heads(value))
        assert ((got[at : at + count] - wanted).abs() <= error + epsilon * (largest + 1)).all()
        at += count


# ---- writing ------------------------------------------------------------------------------------


def hard_rows() -> Tensor:
    """Rows of 32: usual, tiny, huge, of one number, and of zeros."""
    dice = torch.Generator().manual_seed(0)
    rows = torch.randn(300, 1, 32, generator=dice)
    rows[100:200] *= torch.logspace(-12, 6, 100)[:, None, None]
    rows[200:220, :, 1:] = 0
    rows[220] = 0
    rows[221] = 1.0
    return rows


def check_written(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    """|x - s q| <= s / 2 (1 + 2^-10), with the stored s, which is at most one step too large."""
    s = scale.double().unsqueeze(-1)
    assert (codes.abs() <= 127).all()
    assert ((x.double() - s * codes.double()).abs() <= s / 2 * (1 + 2**-10)).all()
    most = x.double().abs().amax(-1)
    assert (scale.double() <= (most / 127) * (1 + 2**-10) + 2**-24).all()
    assert ((codes == 0) | (s > 0)).all()


def test_each_number_is_within_half_a_step() -> None:
    check_written(hard_rows(), *int8_cache.quantize(hard_rows()))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_for_all_who_see_it_and_nobody_else(bad: float) -> None:
    """A key of the 6th position and a value of the 71st; no code hides them."""
    for which in ("keys", "values"):
        case = make_case(0, [80], [80])
        clean, at = case.attend(), 5 if which == "keys" else 70
        rows = getattr(case, which)[0][at : at + 1].clone()
        rows[..., 3] = bad
        other = [case.keys[0][at : at + 1], case.values[0][at : at + 1]]
        other[which == "values"] = rows
        slot = case.tables[0, at // 16] * 16 + at % 16
        ops.write_cache(*other, case.pages, slot[None])
        got = case.attend()
        assert got[at:].isnan().all()
        assert torch.equal(got[:at], clean[:at])


# ---- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_every_element_is_within_its_bound(seed: int, sizes: str) -> None:
    check_bounds(random_case(seed, sizes, torch.float32, "plain"))


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("length", [64, 129, 700, 1100])
def test_the_bits_of_a_query_do_not_depend_on_the_others(length: int, window: int | None) -> None:
    """Whole = in chunks = drafts that are verified = decode."""
    case = make_case(length, [length, 90], [40, 20], 32, window=window, steep=3)
    assert torch.equal(case.attend(), case.one_by_one())


def test_a_sequence_without_positions_is_zero() -> None:
    case = make_case(0, [5, 70], [1, 2])
    got = case.attend(seq_lens=torch.tensor([0, 70]).int())
    assert not got[0].any()
    assert torch.equal(got[1:], case.attend()[1:])


def test_exp2_is_exact_at_integers_and_near_everywhere() -> None:
    x = torch.linspace(-100, 0, 100_001)
    assert (int8_cache.exp2(x).double() / torch.exp2(x.double()) - 1).abs().max() < 2e-7
    whole = torch.arange(-100, 1.0)
    assert torch.equal(int8_cache.exp2(whole), torch.exp2(whole))
    assert int8_cache.exp2(torch.tensor(math.nan)).isnan()
