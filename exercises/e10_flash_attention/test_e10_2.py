"""The public checks of e10.2: tiles of odd sizes against the whole matrix, counted."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import accept, check, close, describe, expect, seeds, tensor
from minillm_exercises.counting import Counts, banned_calls, counting

READY_MADE = ("softmax", "log_softmax", "logsumexp", "logaddexp", "scaled_dot_product_attention")


@dataclass(frozen=True)
class Case:
    """Queries [T, D], keys [S, D], values [S, Dv], the sizes of a tile, and the window."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    block_q: int
    block_k: int
    window: int | None = None

    @classmethod
    def random(
        cls,
        seed: int,
        lengths: tuple[int, int],
        blocks: tuple[int, int],
        window: int | None = None,
        dims: tuple[int, int] = (4, 3),
    ) -> "Case":
        """T and S, block_q and block_k; queries point somewhere, far from an average."""
        return cls(
            tensor(seed, lengths[0], dims[0], scale=2.0).double(),
            tensor(seed + 1, lengths[1], dims[0], scale=2.0).double(),
            tensor(seed + 2, lengths[1], dims[1]).double(),
            *blocks,
            window,
        )

    def seen(self) -> Tensor:
        """Which row sees which position [T, S]."""
        offset = len(self.keys) - len(self.queries)
        position = torch.arange(len(self.queries))[:, None] + offset
        distance = position - torch.arange(len(self.keys))
        widest = len(self.keys) + len(self.queries) if self.window is None else self.window
        return (distance >= 0) & (distance < widest)

    def answer(self) -> tuple[Tensor, Tensor]:
        """What must come out: outputs [T, Dv] and log-sum-exp [T], from the whole matrix."""
        scores = self.queries @ self.keys.T / self.keys.shape[1] ** 0.5
        scores = scores.masked_fill(~self.seen(), -torch.inf)
        outputs = scores.softmax(1).nan_to_num(0.0) @ self.values
        return outputs, scores.logsumexp(1)

    def needed(self) -> Iterator[tuple[int, int]]:
        """Rows and columns of every tile in which a row sees something."""
        for rows in self.seen().split(self.block_q):
            for part in rows.split(self.block_k, dim=1):
                if part.any():
                    yield part.shape[0], part.shape[1]

    def __str__(self) -> str:
        tile = f"block_q={self.block_q}, block_k={self.block_k}, window={self.window}"
        return f"T={len(self.queries)}, S={len(self.keys)}, {tile}"


def ask(impl: Any, case: Case) -> tuple[Any, Any, Counts]:
    """Outputs and log-sum-exp for a case, and what was counted meanwhile."""
    given = [part.clone() for part in (case.queries, case.keys, case.values)]
    with banned_calls(*READY_MADE), counting() as counts:
        got = impl.tiled_attention(*given, case.block_q, case.block_k, case.window)
    same = map(torch.equal, given, (case.queries, case.keys, case.values))
    expect(
        all(same),
        f"{case}: one of the tensors that you were given has changed: does your function compute "
        f"in place (*=, /=, a function whose name ends in _)? Make new tensors.",
    )
    got = accept(got, "tiled_attention", str(case))
    two = type(got) in (tuple, list) and len(got) == 2
    expect(
        two,
        f"{case}: return two tensors, the outputs and the log-sum-exp; got {describe(got)}.",
        type(got).__name__,
    )
    return got[0], got[1], counts


def agree(got: Any, want: Tensor, what: str, case: Case) -> None:
    """`got` is a float64 tensor equal to `want`; NaN and other types get a sentence."""
    about = f"{what} ({case}): "
    if type(got) is Tensor and got.dtype == torch.float64:
        nan = got.isnan()
        blind = [row for row in nan.nonzero()[:, 0].tolist() if not case.seen()[row].any()]
        why = (
            "Infinity minus infinity is NaN. Does a tile show nothing to one of its rows, or is "
            "exp taken of a large number?"
        )
        if blind:
            why = f"Row {blind[0]} sees nothing: zeros, and minus infinity for the log-sum-exp."
        expect(
            not nan.any(),
            f"{about}there is NaN in it. {why}",
            ("NaN", tuple(got.shape), len(blind)) if nan.any() else "numbers",
        )
    elif type(got) is Tensor:
        expect(
            False,
            f"{about}it is {got.dtype}, and all tensors here are torch.float64. One that you make "
            f"yourself is torch.float32 unless you say dtype=queries.dtype.",
            str(got.dtype),
        )
    close(got, want, what, str(case), rtol=1e-9, atol=1e-9)
    expect(type(got) is Tensor, f"{about}got {describe(got)}; return a plain Tensor.")


def follow(impl: Any, case: Case, what: str) -> None:
    """The outputs of one case, compared."""
    agree(ask(impl, case)[0], case.answer()[0], what, case)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Equal weights: the mean of what is seen."""
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0]]).double()
    nothing = torch.zeros(4, 1).double()
    case = Case(nothing[:1], nothing, values, 1, 2)
    for window, mean in ((None, 2.5), (2, 3.5)):
        asked = replace(case, window=window)
        want = torch.full((1, 1), mean).double()
        agree(ask(impl, asked)[0], want, "Equal weights: the output", asked)


@check(2, "One tile is enough")
def test_one_tile(impl: Any) -> None:
    """Blocks as large as everything, or larger."""
    for blocks in ((5, 5), (8, 16)):
        follow(impl, Case.random(10, (5, 5), blocks), "One tile")


@check(2, "Blocks that divide the lengths")
def test_even(impl: Any) -> None:
    """A prompt in square tiles and in others."""
    for blocks in ((2, 2), (4, 2), (2, 8), (1, 1)):
        follow(impl, Case.random(20, (8, 8), blocks), "A prompt of 8")


@check(2, "Blocks that do not divide the lengths")
def test_odd(impl: Any) -> None:
    """The last tile is smaller on either side."""
    for blocks in ((3, 2), (2, 3), (4, 5), (5, 6)):
        follow(impl, Case.random(30, (7, 7), blocks), "A prompt of 7")


@check(2, "One query and a long cache")
def test_decode(impl: Any) -> None:
    """Decoding: nothing to hide, many tiles in a row."""
    for block_q, block_k in ((1, 8), (16, 7), (4, 64)):
        follow(impl, Case.random(40, (1, 50), (block_q, block_k)), "One query")


@check(2, "Several queries after earlier positions")
def test_behind(impl: Any) -> None:
    """T < S: the first row stands at S - T."""
    for lengths in ((3, 8), (4, 9), (7, 8)):
        follow(impl, Case.random(50, lengths, (2, 3)), "Several queries after earlier positions")


@check(2, "A sliding window")
def test_window(impl: Any) -> None:
    """Narrower than a tile, as wide as one, wider, and wider than the text."""
    for window in (1, 2, 3, 5, 20):
        for lengths in ((9, 9), (3, 11)):
            follow(impl, Case.random(60, lengths, (4, 3), window), "A sliding window")


@check(2, "Rows that see nothing")
def test_blind(impl: Any) -> None:
    """T > S: zeros and minus infinity, in tiles of their own and beside rows that see."""
    for blocks in ((2, 2), (3, 4), (8, 8)):
        case = Case.random(70, (7, 3), blocks)
        outputs, sums, _ = ask(impl, case)
        wanted = case.answer()
        agree(outputs, wanted[0], "Rows that see nothing: outputs", case)
        agree(sums, wanted[1], "Rows that see nothing: log-sum-exp", case)


@check(2, "The log-sum-exp of each row")
def test_sums(impl: Any) -> None:
    """Of scores that are scaled, seen, and in all tiles."""
    for lengths, window in (((6, 6), None), ((2, 9), None), ((7, 7), 3)):
        case = Case.random(80, lengths, (3, 2), window)
        agree(ask(impl, case)[1], case.answer()[1], "The log-sum-exp", case)


@check(1, "Scores near a thousand")
def test_large(impl: Any) -> None:
    """Up and down from tile to tile, and from row to row: exp would overflow, or vanish."""
    case = Case.random(90, (6, 6), (2, 2))
    for sign in (40.0, -40.0):
        step = torch.linspace(-sign, sign, 6).double()[:, None]
        loud = replace(case, queries=case.queries.abs() + 10, keys=case.keys / 100 + step)
        follow(impl, loud, "Scores near a thousand")
    queries = (case.queries.abs() + 10) * torch.tensor([1.0, -1.0] * 3).double()[:, None]
    loud = replace(case, queries=queries, keys=case.keys / 100 + 40)
    follow(impl, loud, "Rows in turn near a thousand and near minus a thousand")


@check(3, "No tensor is larger than a tile, a block or the result")
def test_elements(impl: Any) -> None:
    """Long and narrow: a strip of scores is larger than all that one needs."""
    for lengths, blocks, window in (
        ((32, 96), (8, 8), None),
        ((1, 256), (16, 16), None),
        ((48, 48), (8, 16), 20),
    ):
        case = Case.random(100, lengths, blocks, window, (2, 1))
        outputs, _, counts = ask(impl, case)
        shape = tuple(outputs.shape) if type(outputs) is Tensor else describe(outputs)
        expect(
            shape == (lengths[0], 1),
            f"{case}: expected outputs of shape {(lengths[0], 1)}, got {shape}.",
            shape,
        )
        rows, columns = min(blocks[0], lengths[0]), blocks[1]
        most = max(rows * columns, 2 * max(blocks), 2 * lengths[0])
        whole = counts.max_new >= lengths[0] * lengths[1]
        expect(
            counts.max_new <= most,
            f"{case}, D=2, Dv=1: the largest tensor you make has {counts.max_new:,} elements, and "
            f"the largest that is needed has {most:,}. A tile has {rows} x {columns}, the whole "
            f"matrix {lengths[0]} x {lengths[1]}. Mind masks and positions: they are tensors, too.",
            "lean" if counts.max_new <= most else ("fat", whole),
        )


@check(3, "Only the tiles in which a row sees a position")
def test_tiles(impl: Any) -> None:
    """The operations of the tiles above the diagonal and behind the window are not there."""
    for lengths, blocks, window in (
        ((16, 16), (4, 4), None),
        ((6, 21), (3, 4), None),
        ((20, 20), (4, 4), 5),
        ((1, 64), (2, 8), 10),
        ((12, 4), (3, 2), None),
    ):
        case = Case.random(110, lengths, blocks, window)
        worked(ask(impl, case), case)


def worked(got: tuple[Any, Any, Counts], case: Case) -> None:
    """The operations are those of the needed tiles: what is seen at least, whole tiles at most."""
    outputs, _, counts = got
    shape = tuple(outputs.shape) if type(outputs) is Tensor else describe(outputs)
    expected = (len(case.queries), 3)
    expect(shape == expected, f"{case}: expected outputs of shape {expected}, got {shape}.", shape)
    each = 2 * (case.keys.shape[1] + case.values.shape[1])  # per pair of row and position
    tiles = list(case.needed())
    least, most = each * int(case.seen().sum()), each * sum(a * b for a, b in tiles)
    whole = each * len(case.queries) * len(case.keys)
    expect(
        counts.flops <= most,
        f"{case}: your matrix products take {counts.flops:,} operations. {len(tiles)} tiles are "
        f"needed, with {most:,}; all tiles would take {whole:,}. Which of them do you visit "
        f"although no row in them sees a position, above the diagonal or before the window?",
        ("too many", counts.flops) if counts.flops > most else "not too many",
    )
    expect(
        counts.flops >= least,
        f"{case}: your matrix products take {counts.flops:,} operations, and what is seen takes "
        f"{least:,}. Is a needed tile skipped? Write products as matrix products (@, "
        f"einsum, matmul), so that they can be counted.",
        ("too few", counts.flops) if counts.flops < least else "enough",
    )


@check(3, "Twelve random shapes")
def test_everything(impl: Any) -> None:
    """Random lengths, tiles and windows; outputs and log-sum-exp."""
    for seed in seeds(12):
        draw = random.Random(seed)
        lengths = (draw.randint(1, 12), draw.randint(1, 12))
        blocks = (draw.randint(1, 6), draw.randint(1, 6))
        window = draw.choice((None, draw.randint(1, 12)))
        dims = (draw.randint(1, 5), draw.randint(1, 5))
        case = Case.random(seed, lengths, blocks, window, dims)
        outputs, sums, _ = ask(impl, case)
        wanted = case.answer()
        agree(outputs, wanted[0], "A random shape: outputs", case)
        agree(sums, wanted[1], "A random shape: log-sum-exp", case)
