"""The checks of e11.2. Memory that no sequence may read is NaN: slots behind a length, pages that
belong to no sequence, and what lies around every tensor."""

import math
import random
from types import ModuleType

import torch

from minillm_exercises.checking import check, expect, seeds, tensor
from minillm_exercises.triton_checks import (
    DEVICE,
    Seen,
    bytes_read,
    compiles,
    filled,
    guarded,
    output,
    watching,
)

STALE = 1  # the page in the unused entries of the tables; it belongs to no sequence


class Case:
    """A cache in shuffled pages, with its sequences."""

    def __init__(
        self,
        seed: int,
        lengths: list[int],
        heads: int = 1,
        kv_heads: int = 1,
        dim: int = 16,
        page: int = 4,
        shared: bool = False,
        spare: int = 2,
    ) -> None:
        draw = random.Random(seed)
        self.lengths, self.heads, self.kv_heads, self.page = lengths, heads, kv_heads, page
        need = [-(-length // page) for length in lengths]
        width = max([*need, 1]) + spare
        free = [0, *range(2, sum(need) + 4)]
        draw.shuffle(free)
        self.tables = torch.full((len(lengths), width), STALE, dtype=torch.int32)
        blocks = len(free) + 1
        self.k = torch.full((blocks, page, kv_heads, dim), math.nan)
        self.v = self.k.clone()
        self.q = tensor(seed, len(lengths), heads, dim)
        for row, length in enumerate(lengths):
            for place in range(need[row]):
                if shared and row and place == 0:  # the first page of all is one and full
                    self.tables[row, 0] = self.tables[0, 0]
                    continue
                block = free.pop()
                self.tables[row, place] = block
                held = min(page, length - place * page)
                numbers = tensor(seed + 97 * row + place + 1, 2, held, kv_heads, dim)
                self.k[block, :held], self.v[block, :held] = numbers

    def wanted(self, scale: float) -> torch.Tensor:
        """Attention in float64, sequence by sequence and head by head."""
        result = torch.zeros(self.q.shape, dtype=torch.float64)
        for row, length in enumerate(self.lengths):
            pages = self.tables[row, : -(-length // self.page)].long()
            k = self.k[pages].flatten(0, 1)[:length].double()
            v = self.v[pages].flatten(0, 1)[:length].double()
            for head in range(self.heads if length else 0):
                kv_head = head // (self.heads // self.kv_heads)
                weights = (k[:, kv_head] @ self.q[row, head].double() * scale).softmax(0)
                result[row, head] = weights @ v[:, kv_head]
        return result.float()

    def run(
        self, impl: ModuleType, splits: int, what: str, scale: float = 0.25, rtol: float = 1e-4
    ) -> Seen:
        """Call the submission, and look at the result and around it."""
        q, k, v = guarded(self.q), guarded(self.k), guarded(self.v)
        width = self.tables.shape[1]
        tables = guarded(self.tables, (width + 3, 1), STALE)
        counts = guarded(torch.tensor(self.lengths, dtype=torch.int32))
        out = output(*self.q.shape)
        with watching(impl, q=q.view, k_cache=k.view, v_cache=v.view, out=out.view) as seen:
            impl.paged_decode(
                q.view, k.view, v.view, tables.view, counts.view, scale, splits, out.view
            )
        seen.ran("paged_decode")
        case = f"{what}, splits={splits}"
        filled(out, self.wanted(scale), "paged_decode", case, rtol)
        given = {"q": q, "k_cache": k, "v_cache": v, "block_tables": tables, "seq_lens": counts}
        for name, each in given.items():
            each.unharmed(name, case)
        return seen


@check(points=1, task="the example of the README")
def test_by_hand(impl):
    case = Case(0, [3], page=2)
    case.q.fill_(0.0)
    case.q[0, 0, 0] = 1.0
    first, second = case.tables[0, :2].tolist()
    case.k[first], case.k[second, 0] = 0.0, 0.0
    case.k[first, 1, 0, 0] = math.log(2) * 4  # a score of log 2: twice the weight
    for block, slot, value in ((first, 0, 4.0), (first, 1, 8.0), (second, 0, 12.0)):
        case.v[block, slot] = value
    case.run(impl, 1, "3 tokens with weights 1/4, 1/2 and 1/4, values 4, 8 and 12")


@check(points=2, task="pages in any order, the last one not full")
def test_pages(impl):
    first, second = seeds(2)
    Case(first, [8, 5, 11]).run(impl, 1, "pages of 4, lengths 8, 5 and 11")
    Case(second, [7, 16], page=8, dim=32).run(impl, 1, "pages of 8, lengths 7 and 16, 32 wide")
    Case(second, [5, 8], spare=0).run(impl, 1, "pages of 4, lengths 5 and 8, full tables")


@check(points=2, task="query heads share KV heads in groups")
def test_groups(impl):
    (seed,) = seeds(1)
    Case(seed, [6, 3], heads=4, kv_heads=2).run(impl, 1, "4 query heads and 2 KV heads")
    Case(seed, [5], heads=6, kv_heads=2).run(impl, 1, "6 query heads and 2 KV heads")
    Case(seed, [5, 4], heads=3, kv_heads=3).run(impl, 1, "3 query heads and 3 KV heads")


@check(points=1, task="sequences of length 0 and 1")
def test_short(impl):
    (seed,) = seeds(1)
    Case(seed, [1, 0, 4], heads=2).run(impl, 1, "lengths 1, 0 and 4")


@check(points=1, task="large scores, and a maximum that comes late")
def test_large(impl):
    (seed,) = seeds(1)
    case = Case(seed, [12], heads=2)
    for place in range(3):
        block = int(case.tables[0, place])
        case.k[block] *= 0.1
        case.k[block, :, :, 0] += 60.0 * (place - 4)
    case.q[:, :, 0] = torch.tensor([[8.0, -8.0]])
    what = "scores that rise to -240 for one head, and fall to 240 for the other"
    for splits in (1, 3):
        case.run(impl, splits, what, rtol=1e-3)  # a score of 480 is known to 3e-5 in float32


@check(points=1, task="the scale multiplies the scores")
def test_scale(impl):
    (seed,) = seeds(1)
    for scale in (1.0, 0.1):
        Case(seed, [6, 9]).run(impl, 1, f"lengths 6 and 9, scale {scale:g}", scale)


@check(points=2, task="parts of a sequence are put together")
def test_splits(impl):
    (seed,) = seeds(1)
    Case(seed, [21, 4, 0]).run(impl, 2, "pages of 4, lengths 21, 4 and 0")
    Case(seed, [11], heads=2).run(impl, 5, "pages of 4, length 11, 2 query heads")


@check(points=1, task="sequences that share a page")
def test_shared(impl):
    (seed,) = seeds(1)
    case = Case(seed, [9, 6, 4], heads=2, kv_heads=2, shared=True)
    case.run(impl, 2, "lengths 9, 6 and 4, the first page of all is one")


@check(points=2, task="each page is read once for all heads, and the grid is as asked")
def test_traffic(impl):
    (seed,) = seeds(1)
    lengths, what = [10, 3], "lengths 10 and 3, 4 query heads and 2 KV heads"
    case = Case(seed, lengths, heads=4, kv_heads=2)
    seen = case.run(impl, 3, what)
    programs = max(launch.programs for launch in seen.launches)
    expect(
        programs == 12,
        f"paged_decode ({what}, splits=3): the largest launch has {programs} programs; it is one "
        f"for each of 2 sequences, 2 KV heads and 3 splits, which makes 12.",
        observed=programs,
    )
    count = len(seen.launches)
    expect(count <= 2, f"paged_decode ({what}): {count} launches; take 2 at most.", observed=count)
    copied = seen.host.copied
    expect(
        copied == 0,
        f"paged_decode ({what}): {copied} bytes were copied beside the kernels; that is traffic, "
        f"too.",
        observed=copied,
    )
    why = "4 pages of 4 tokens are read once for each of 2 KV heads, 16 numbers a token"
    for name in ("k_cache", "v_cache"):
        bytes_read(seen, name, 4 * 16 * 2 * 16, why, what, least=4 * 13 * 2 * 16)


@check(points=1, task="Triton's compiler takes the kernels")
def test_compiles(impl):
    def call(submission):
        case = Case(3, [10, 3], heads=6, kv_heads=2)
        counts = torch.tensor(case.lengths, dtype=torch.int32)
        given = [t.to(DEVICE) for t in (case.q, case.k, case.v, case.tables, counts)]
        submission.paged_decode(*given, 0.25, 3, torch.empty_like(given[0]))

    compiles(impl, call, 2, "paged_decode")
