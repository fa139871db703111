"""A KV cache of 8 bits: the error of every element is within its bound, and the bits of a query
depend on nothing but its position. In plain torch, which defines them, and in C."""

import math
import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minillm import ops
from minillm.cache.spec import cache_spec
from minillm.layers.kv_cache import KVCache
from minillm.models.decoder import Decoder
from minillm.ops import c_library, cpu
from minillm.ops.batch import Batch, Pages, Prologue
from minillm_kernels import int8_cache, reference
from tests.ops import small_decoders
from tests.ops.c_variants import ELEMENTS, PATHS, built, parameters, use, with_threads
from tests.pairs import some

TILE = 64
INT8_PATHS = (*PATHS, "baseline")  # of PRODUCT_PATHS
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


def test_a_slot_that_is_written_again_is_as_new() -> None:
    """Codes and scales of the last owner are gone."""
    case, other = (make_case(seed, [37], [20]) for seed in (0, 1))
    for pages in (case.pages, other.pages):
        slots = torch.arange(37)
        for x in (other, case):
            ops.write_cache(x.keys[0], x.values[0], pages, slots)
    assert torch.equal(case.pages.key[:2], other.pages.key[:2])
    scales = case.pages.key_scale[:2]
    assert torch.equal(scales, other.pages.key_scale[:2])
    assert torch.equal(scales.flatten()[:16], int8_cache.quantize(case.keys[0])[1][:16, 0])


# ---- attention ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_every_element_is_within_its_bound(seed: int, sizes: str) -> None:
    check_bounds(random_case(seed, sizes, torch.float32, "plain"))


@pytest.mark.parametrize(
    ("length", "window"),
    some([(64, None), (129, 70), (700, None)], product([64, 129, 700, 1100], [None, 70])),
)
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


# ---- in C ---------------------------------------------------------------------------------------

Library = tuple[c_library.Library, torch.dtype]


CASES = parameters(*((path, element) for path in INT8_PATHS for element in ELEMENTS))


@pytest.fixture(scope="module", params=CASES)
def c(request) -> Library:
    """A library for one element type, for this processor or as for one that can do less."""
    path, element = request.param
    return built(path, element), ELEMENTS[element]


@pytest.fixture
def dtype(c: Library, monkeypatch) -> torch.dtype:
    """The element type; operations use its library."""
    use(monkeypatch, *c)
    return c[1]


def check_bits(case: Case) -> None:
    """Those of torch, and those of each query alone."""
    wanted = case.attend()
    fast = replace(case, way="fast")
    assert torch.equal(fast.attend(), wanted)
    if sum(case.counts) <= 60:
        assert torch.equal(fast.one_by_one(), wanted)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(6))
def test_c_has_the_bits_of_torch(dtype, seed: int, sizes: str) -> None:
    check_bits(random_case(seed + 100, sizes, dtype, "plain"))


def check_threads(found: c_library.Library, dtype: torch.dtype) -> None:
    """A long sequence in parts, drafts beside it, and a prompt."""
    case = make_case(3, [1500, 1030, 200], [1, 4, 150], 32, window=None, dtype=dtype, steep=3)
    windowed = make_case(4, [1500, 600], [1, 2], 32, window=600, dtype=dtype, steep=3)
    for each in (case, windowed):
        wanted = each.attend()
        for threads in (1, 3):
            with with_threads(found, threads):
                assert torch.equal(replace(each, way="fast").attend(), wanted)


def test_threads_change_no_bit(c, dtype) -> None:
    check_threads(cpu.functions(dtype), dtype)


def check_prologue(dtype: torch.dtype, normed: bool) -> None:
    """Norm, rotation and rounding in one call are those of operations, to their slots only."""
    dice = torch.Generator().manual_seed(7)
    qkv = torch.randn(5, 4 + 2 * 2, 32, generator=dice).to(dtype)
    qkv[3, 5, 7] = math.nan  # a key
    norms = [torch.rand(32, generator=dice).to(dtype) if normed else None for _ in range(2)]
    rope = tuple(torch.rand(5, 16, generator=dice) for _ in range(2))
    slots = torch.tensor([17, 2, -1, 15])
    found = []
    for mode in ("fast", "plain"):
        case = make_case(0, [40], [1], 32, 4, dtype=dtype)
        q = ops.norm_rope_write(
            qkv, Prologue(2, *norms, 1e-5, False), rope, case.pages, slots, mode
        )
        found.append((q, *case.pages))
    one_step = 0.02 if dtype == torch.bfloat16 else 1e-5  # rounding of norm and rotation
    torch.testing.assert_close(found[0][0], found[1][0], atol=one_step, rtol=one_step)
    for got, wanted in zip(found[0][1:], found[1][1:], strict=True):
        off = (got.float() - wanted.float()).abs().nan_to_num(0)
        assert off.max() <= (2 if got.dtype != torch.float16 else one_step)
        assert torch.equal(got.float().isnan(), wanted.float().isnan())
        assert torch.equal(got.float().isinf(), wanted.float().isinf())
    with pytest.raises(IndexError, match="slot"):
        ops.norm_rope_write(qkv, Prologue(2, *norms, 1e-5, False), rope, case.pages,
                            slots + 10_000)  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
def test_prologue_and_writing_are_one_call(dtype, normed: bool) -> None:
    check_prologue(dtype, normed)


def test_c_rounds_as_torch(dtype) -> None:
    """Without norm and rotation keys are what they were: all of the hard rows, bit for bit."""
    rows = hard_rows().to(dtype)
    rows[5, 0, 3], rows[9, 0, 1] = math.nan, math.inf
    qkv, turn = rows.expand(-1, 3, -1), (torch.ones(len(rows), 16), torch.zeros(len(rows), 16))
    found = []
    for mode in ("fast", "plain"):
        case = make_case(0, [len(rows)], [1], 32, 12, kv_heads=1, dtype=dtype)
        slots = torch.arange(len(rows))
        ops.norm_rope_write(qkv, Prologue(1, None, None, 0, False), turn, case.pages, slots, mode)
        found.append(case.pages)
    for got, wanted in zip(*found, strict=True):
        assert torch.equal(got.nan_to_num(-7), wanted.nan_to_num(-7))


OUTSIDE = {
    "a block": lambda case: {"block_tables": case.tables + 1000},
    "a long sequence": lambda case: {"seq_lens": torch.tensor([5000, 3]).int()},
    "a negative length": lambda case: {"seq_lens": torch.tensor([-1, 3]).int()},
    "queries": lambda case: {"query_start": torch.tensor([0, 1, 9]).int()},
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_points_outside_is_refused(dtype, what: str) -> None:
    case = make_case(0, [40, 3], [1, 1], dtype=dtype, way="fast")
    with pytest.raises(IndexError, match="point outside"):
        case.attend(**OUTSIDE[what](case))


# ---- all layers ---------------------------------------------------------------------------------


def int8_cache_of(model: Decoder) -> KVCache:
    """A cache of codes, full of what shows when it is read before it is written."""
    config, size = model.config, (small_decoders.NUM_BLOCKS, small_decoders.BLOCK)
    kv = KVCache(cache_spec(config, "int8"), config.num_layers, *size, model.dtype)
    for tensor in kv.tensors:
        tensor.fill_(math.nan if tensor.is_floating_point() else 91)
    return kv


@pytest.mark.parametrize("name", small_decoders.CONFIGS)
def test_one_call_is_the_layers_one_by_one(name: str, monkeypatch) -> None:
    """Windows, biases, norms of heads; and near to a cache that is not rounded."""
    if cpu.functions(torch.bfloat16) is None:
        pytest.skip(cpu.describe(torch.bfloat16))
    monkeypatch.setenv(cpu.PANELS, "1")
    model = small_decoders.build(small_decoders.CONFIGS[name])
    mine, theirs, plain = (
        int8_cache_of(model),
        int8_cache_of(model),
        small_decoders.new_cache(model),
    )
    for batch in small_decoders.steps():
        got = small_decoders.forward(model, batch, mine)
        assert torch.equal(got, small_decoders.forward(model, batch, theirs, at_once=False))
        near = small_decoders.forward(model, batch, plain)
        assert 0 < (got - near).float().norm() < 0.1 * near.float().norm()
    for one, other in zip(mine.tensors, theirs.tensors, strict=True):
        assert torch.equal(one.nan_to_num(-7), other.nan_to_num(-7))
