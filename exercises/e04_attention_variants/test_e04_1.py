"""The public checks of e04.1: groups of every size, and how much memory they take."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import check, close, describe, expect, seeds, tensor
from minillm_exercises.counting import Counts, banned_calls, counting


@dataclass(frozen=True)
class Case:
    """The queries [T, H, Dk], keys [S, Hkv, Dk] and values [S, Hkv, Dv] of one layer."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(
        cls, seed: int, tokens: int, length: int, heads: tuple[int, int], dims: tuple[int, int]
    ) -> "Case":
        """T and S, H and Hkv, Dk and Dv; queries point somewhere, far from an average."""
        return cls(
            tensor(seed, tokens, heads[0], dims[0], scale=2.0).double(),
            tensor(seed + 1, length, heads[1], dims[0], scale=2.0).double(),
            tensor(seed + 2, length, heads[1], dims[1]).double(),
        )

    def output(self) -> Tensor:
        """What must come out [T, H, Dv], one query and one head at a time."""
        group = self.queries.shape[1] // self.keys.shape[1]
        first = len(self.keys) - len(self.queries)  # the position of the first query
        rows = []
        for row, query in enumerate(self.queries):
            seen = slice(0, first + row + 1)
            for head, q in enumerate(query):
                k, v = self.keys[seen, head // group], self.values[seen, head // group]
                rows.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)
        return torch.stack(rows).view(*self.queries.shape[:2], -1)

    def __str__(self) -> str:
        tokens, heads, key_dim = self.queries.shape
        length, kv_heads, dim = self.values.shape
        return f"T={tokens}, S={length}, H={heads}, Hkv={kv_heads}, Dk={key_dim}, Dv={dim}"


def ask(impl: Any, case: Case) -> tuple[Any, Counts]:
    """What came out for a case, and what was counted meanwhile."""
    given = [part.clone() for part in (case.queries, case.keys, case.values)]
    with banned_calls("scaled_dot_product_attention"), counting() as counts:
        got = impl.grouped_attention(*given)
    same = map(torch.equal, given, (case.queries, case.keys, case.values))
    expect(
        all(same),
        f"{case}: one of the tensors that you were given has changed: does your function compute "
        f"in place (*=, /=, a function whose name ends in _)? Make new tensors.",
    )
    return got, counts


def agree(got: Any, want: Tensor, what: str, case: object) -> None:
    """`got` is a float64 tensor equal to `want`; NaN and other types get a sentence."""
    about = f"{what} ({case}): "
    if type(got) is Tensor and got.dtype == torch.float64:
        expect(
            not got.isnan().any(),
            f"{about}there is NaN in it, which is what a softmax over no position at all gives. "
            f"Each query sees the positions up to its own, and its own too.",
            ("NaN", tuple(got.shape)) if got.isnan().any() else "numbers",
        )
    elif type(got) is Tensor:
        expect(
            False,
            f"{about}it is {got.dtype}, and all tensors here are torch.float64. One that you make "
            f"yourself is torch.float32 unless you say dtype=queries.dtype.",
            str(got.dtype),
        )
    elif type(got) in (list, tuple, float, int):
        kind = type(got).__name__
        expect(False, f"{about}got a {kind}; return a Tensor [T, H, Dv].", kind)
    close(got, want, what, str(case), rtol=1e-9, atol=1e-9)
    expect(type(got) is Tensor, f"{about}got {describe(got)}; return a plain Tensor.")


def follow(impl: Any, case: Case, what: str) -> None:
    """One case, compared."""
    agree(ask(impl, case)[0], case.output(), what, case)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Equal weights: the mean of each head's values."""
    values = torch.tensor([[[1.0], [10.0]], [[3.0], [30.0]]]).double()
    case = Case(torch.zeros(1, 4, 1).double(), torch.zeros(2, 2, 1).double(), values)
    want = torch.tensor([[[2.0], [2.0], [20.0], [20.0]]]).double()
    agree(ask(impl, case)[0], want, "Equal weights, heads 0 and 1 share", case)


@check(1, "A query on its own position")
def test_alone(impl: Any) -> None:
    """One position: its value comes out, whatever the score."""
    follow(impl, Case.random(10, 1, 1, (3, 1), (2, 2)), "One position")


@check(2, "A key-value head for each query head")
def test_no_groups(impl: Any) -> None:
    """Multi-head attention: a whole prompt, and one query behind others."""
    follow(impl, Case.random(20, 5, 5, (3, 3), (4, 4)), "A prompt without groups")
    follow(impl, Case.random(25, 1, 6, (4, 4), (4, 4)), "One query without groups")


@check(2, "One query and groups")
def test_decode(impl: Any) -> None:
    """A step of decoding: nothing to hide, heads to share."""
    for heads in ((6, 2), (6, 3), (8, 2)):
        follow(impl, Case.random(30 + heads[1], 1, 7, heads, (4, 4)), "One query")


@check(2, "One key-value head for all query heads")
def test_one_head(impl: Any) -> None:
    """Multi-query attention."""
    follow(impl, Case.random(40, 1, 6, (4, 1), (3, 3)), "One query on one key head")
    follow(impl, Case.random(45, 4, 4, (5, 1), (3, 3)), "A prompt on one key head")


@check(2, "A whole prompt and groups")
def test_prompt(impl: Any) -> None:
    """T = S: the first query sees only itself."""
    follow(impl, Case.random(50, 6, 6, (6, 2), (4, 4)), "A prompt")


@check(2, "Several queries after earlier positions")
def test_behind(impl: Any) -> None:
    """T < S: the first query sees all that was there before it."""
    for tokens, length in ((2, 5), (3, 11), (7, 8)):
        case = Case.random(60 + tokens, tokens, length, (4, 2), (4, 4))
        follow(impl, case, "Several queries after earlier positions")


@check(2, "Values wider or narrower than keys")
def test_widths(impl: Any) -> None:
    """The root is that of the keys' width."""
    follow(impl, Case.random(70, 1, 6, (4, 2), (4, 9)), "Wide values")
    follow(impl, Case.random(75, 3, 6, (4, 2), (9, 1)), "Narrow values")


@check(1, "Scores in the thousands")
def test_large_scores(impl: Any) -> None:
    """Three keys near each other, and the query's own far below them: exp alone would overflow."""
    sizes = torch.tensor([8.0, 8.0 + 1 / 128, 8.0 + 1 / 64, -8.0]).double()
    keys = sizes[:, None, None].expand(4, 2, 4).contiguous()
    queries = torch.full((1, 4, 4), 64.0).double()
    case = Case(queries, keys, tensor(90, 4, 2, 4).double())
    follow(impl, case, "Scores 1024, 1025, 1026 and -1024")


@check(3, "No copies of keys or values")
def test_copies(impl: Any) -> None:
    """Few queries and many wide positions: a copy is larger than anything one needs."""
    shapes = ((1, 64, (8, 2)), (3, 80, (8, 2)), (1, 64, (6, 1)), (1, 64, (4, 4)))
    for number, (tokens, length, heads) in enumerate(shapes):
        case = Case.random(80 + 5 * number, tokens, length, heads, (32, 32))
        got, counts = ask(impl, case)
        agree(got, case.output(), "Many wide positions", case)
        lean(counts, case)


def lean(counts: Counts, case: Case) -> None:
    """The largest new tensor is smaller than the keys."""
    size, times = case.keys.numel(), case.queries.shape[1] // case.keys.shape[1]
    copied = counts.max_new >= size
    repeated = copied and times > 1 and counts.max_new >= times * size
    by_product = repeated and "clone _unsafe_view bmm" in " ".join(counts.ops)
    why = "Something copies them: contiguous(), clone(), an index, a product that broadcasts?"
    if repeated:
        why = (
            f"That is every key-value head {times} times over: repeat_interleave, an index, or a "
            f"reshape of what was expanded? Give the group a dimension of the queries instead."
        )
    if by_product:
        why = (
            f"That is every key-value head {times} times over, and a matrix product did it: @ and "
            f"einsum copy what they broadcast over a batch dimension. Let the queries of a group "
            f"be rows of one matrix."
        )
    expect(
        not copied,
        f"{case}: the largest tensor you make has {counts.max_new:,} elements; the keys have "
        f"{size:,}. {why}",
        ("copied", repeated, by_product),
    )


@check(2, "Twelve random shapes")
def test_everything(impl: Any) -> None:
    """Random numbers of everything."""
    for seed in seeds(12):
        draw = random.Random(seed)
        kv_heads, group, key_dim, dim = (draw.randint(1, 4) for _ in range(4))
        length = draw.randint(1, 9)
        shape = (draw.randint(1, length), length, (kv_heads * group, kv_heads), (key_dim, dim))
        follow(impl, Case.random(seed, *shape), "A random shape")
