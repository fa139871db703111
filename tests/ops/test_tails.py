"""Attention of token trees: each node sees the sequence before the tree and its ancestors.

One call for a tree has the bits of a call for each of its paths alone, whose keys are stored one
after another, in C and in torch, with 16-bit pages, codes, MLA and windows. What a node sees is
compared with a mask in float64 that follows from the parents alone. Other slots hold NaN.
"""

import math
import random
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from minillm import ops
from minillm.cache.spec import CacheSpec
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import BlockTables, make_batch
from minillm.models.trees import ROOT, Tree, tree_batch
from minillm.ops.batch import Batch, Pages
from tests.ops.c_variants import ELEMENTS, built, parameters, use, with_threads

BLOCKS = 200


@dataclass(frozen=True)
class Case:
    """Rows of a batch, each with a tree or without, and what is stored of each: keys [S, Hkv, D]
    and values in the order of slots."""

    q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    starts: list[int]
    trees: list[Tree | None]
    batch: Batch
    pages: Pages
    scale: float
    window: int | None
    mode: str

    def attend(self, batch: Batch | None = None) -> Tensor:
        return ops.paged_attention(
            self.q, self.pages, batch or self.batch, self.scale, self.window, self.mode
        )


def random_tree(dice: random.Random, most: int = 63) -> Tree:
    """Any tree, a chain or a star among them."""
    count, reach = dice.randint(1, most), dice.choice([1, 2, 8, 64])
    return Tree(tuple(dice.randrange(max(ROOT, i - 1 - reach), i) for i in range(count)))


def pages_of(
    kind: str, heads: int, size: int, dim: int, dtype: torch.dtype, blocks: int = BLOCKS
) -> Pages:
    """Of one layer, every slot NaN: codes by their scales."""
    spec = CacheSpec(heads, dim, dim // 2 if kind == "mla" else dim, value_in_key=kind == "mla",
                     int8=kind == "int8")  # fmt: skip
    kv = KVCache(spec, 1, blocks, size, dtype)
    for tensor in kv.tensors:
        tensor.fill_(math.nan if tensor.dtype.is_floating_point else 7)
    return kv.pages[0]


def write(pages: Pages, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Of a sequence; with MLA a value is the first part of its key."""
    mla = pages.value.data_ptr() == pages.key.data_ptr()
    ops.write_cache(key, None if mla else value, pages, slots)


def make_case(seed: int, kind: str, dtype: torch.dtype, mode: str, most: int = 63) -> Case:
    dice, draw = random.Random(seed), torch.Generator().manual_seed(seed)
    size, dim, group = dice.choice([4, 16, 32]), dice.choice([16, 64]), dice.choice([1, 3, 4])
    heads = 1 if kind == "mla" else dice.choice([1, 2])
    starts = [dice.choice([0, 1, size - 1, size, 62, 64, 130]) for _ in range(dice.randint(1, 3))]
    trees = [random_tree(dice, most), *(
        dice.choice([None, random_tree(dice, 5)]) for _ in starts[1:])]  # fmt: skip
    counts = [dice.choice([1, 3, 40]) if tree is None else len(tree.depths) for tree in trees]
    tables = BlockTables(4, 64, torch.device("cpu"))
    order = torch.randperm(BLOCKS, generator=draw).tolist()
    tables.write([(row, 0, [order.pop() for _ in range(50)]) for row in range(len(starts))])
    rows = list(range(len(starts)))
    flat = make_batch(tables, size, rows, starts, counts, [0] * sum(counts))
    batch = tree_batch(flat, starts, counts, trees)
    pages, keys, values = pages_of(kind, heads, size, dim, dtype), [], []
    for row, start, count in zip(rows, starts, counts, strict=True):
        place = torch.arange(start + count)
        slots = torch.from_numpy(tables.host[row])[place // size] * size + place % size
        keys.append(torch.randn(len(place), heads, dim, generator=draw).to(dtype))
        values.append(torch.randn(len(place), heads, dim, generator=draw).to(dtype))
        write(pages, keys[-1], values[-1], slots)
    q = torch.randn(sum(counts), heads * group, dim, generator=draw).to(dtype)
    window = dice.choice([None, None, 2, 33])
    return Case(q, keys, values, starts, trees, batch, pages, dim**-0.5, window, mode)


def ancestors(tree: Tree, node: int) -> list[int]:
    """The nodes that a node sees, the root first, from the parents alone."""
    found = [node]
    while found[-1] != 0:
        found.append(tree.parents[found[-1] - 1] + 1)
    return found[::-1]


def seen_by(case: Case) -> list[tuple[int, int, list[int]]]:
    """Of each query: its index, its row, and the places of what it sees, by position."""
    found, at = [], 0
    for row, (start, tree) in enumerate(zip(case.starts, case.trees, strict=True)):
        for i in range(len(case.keys[row]) - start):
            own = range(start, start + i + 1)
            if tree is not None:
                own = [start + node for node in ancestors(tree, i)]
            found.append((at, row, [*range(start), *own]))
            at += 1
    return found


def alone(case: Case, row: int, places: list[int], query: int) -> Tensor:
    """The same query over its path alone, whose keys are stored one after another."""
    kind = "int8" if case.pages.key_scale is not None else "plain"
    mla = case.pages.value.data_ptr() == case.pages.key.data_ptr()
    _, heads, size, dim = case.pages.key.shape
    blocks = -(-len(places) // size)
    pages = pages_of("mla" if mla else kind, heads, size, dim, case.q.dtype, blocks)
    write(pages, case.keys[row][places], case.values[row][places], torch.arange(len(places)))
    none, one = torch.empty(0, dtype=torch.int64), torch.tensor([0, 1]).int()
    batch = Batch(none, none, none, one, torch.tensor([len(places)]).int(),
                  torch.arange(blocks)[None], none, 1)  # fmt: skip
    q = case.q[query : query + 1]
    return ops.paged_attention(q, pages, batch, case.scale, case.window, case.mode)[0]


def exact(case: Case, row: int, places: list[int], query: int) -> Tensor:
    """In float64, by what the query sees: [H, Dv]."""
    key, value = case.keys[row].double(), case.values[row].double()
    if case.pages.value.data_ptr() == case.pages.key.data_ptr():
        value = key[..., : case.pages.value.shape[3]]
    group = case.q.shape[1] // key.shape[1]
    last = len(places) - 1
    places = [each for i, each in enumerate(places) if last - i < (case.window or math.inf)]
    key, value = (x[places].repeat_interleave(group, 1) for x in (key, value))
    scores = torch.einsum("hd,shd->hs", case.q[query].double(), key) * case.scale
    return torch.einsum("hs,shd->hd", scores.softmax(-1), value)


def check(case: Case) -> None:
    found, error = case.attend(), 3e-6 if case.q.dtype == torch.float32 else 0.02
    assert not found.isnan().any()
    for query, row, places in seen_by(case):
        if case.trees[row] is not None:  # others may be computed by another function
            assert torch.equal(found[query], alone(case, row, places, query))
        if case.pages.key_scale is None:
            difference = found[query].double() - exact(case, row, places, query)
            assert difference.abs().max() < error


KINDS = "plain", "int8", "mla"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("built_as", parameters(*product(("native", "baseline"), ELEMENTS)))
def test_in_c_a_tree_is_its_paths(built_as, kind, monkeypatch):
    path, element = built_as
    library = built(path, element)
    use(monkeypatch, library, ELEMENTS[element])
    for seed in range(15):
        with with_threads(ops.cpu.functions(ELEMENTS[element]), 1 + seed % 3):
            check(make_case(seed, kind, ELEMENTS[element], "fast", 20))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["plain", "invariant"])
def test_in_torch_a_tree_is_its_paths(mode, kind):
    for seed in range(10):
        check(make_case(seed, kind, torch.float32, mode, 12))


def test_a_row_is_divided_among_threads_as_one_sequence():
    """A tree behind a long text, whose parts are tasks of their own."""
    case = make_case(3, "plain", torch.float32, "fast")
    with with_threads(ops.cpu.functions(torch.float32), 3):
        assert torch.equal(case.attend(), make_case(3, "plain", torch.float32, "fast").attend())


@pytest.mark.parametrize("kind", ["plain", "int8"])
def test_a_tail_outside_of_the_table_is_an_error(kind):
    case = make_case(0, kind, torch.float32, "fast")
    tails = case.batch.tails
    assert tails is not None
    longest = case.batch.block_tables.shape[1] * case.pages.key.shape[2]
    for starts, order in (
        (tails.starts, tails.order + longest),
        (tails.starts, tails.order - 99),
        (tails.starts - 200, tails.order),
        (tails.starts, tails.order[:, :1]),
    ):
        wrong = type(tails)(starts.contiguous(), order.contiguous())
        with pytest.raises(IndexError, match="point outside the cache"):
            case.attend(replace(case.batch, tails=wrong))
    short = type(tails)(tails.starts[1:], tails.order)
    with pytest.raises(ValueError, match="starts"):
        case.attend(replace(case.batch, tails=short))
