"""The public checks of e03.2: texts that go round the ring several times, windows of odd sizes."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import check, close, describe, expect, seeds, tensor


def turned(x: Tensor, position: int) -> Tensor:
    """One token's heads [.., D], rotated to its place in the text, in float64."""
    half = x.shape[-1] // 2
    angle = position * 100.0 ** (-torch.arange(half).double() / half)
    first, second = x.double().split(half, dim=-1)
    return torch.cat(
        (first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), -1
    )


@dataclass(frozen=True)
class Text:
    """The queries [N, H, D], keys and values [N, Hkv, D] of a request's tokens, not rotated."""

    queries: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def random(cls, seed: int, length: int, heads: int, kv_heads: int, dim: int) -> "Text":
        """A text whose queries point somewhere, so that attention is far from an average."""
        return cls(
            tensor(seed, length, heads, dim, scale=2.0),
            tensor(seed + 1, length, kv_heads, dim, scale=2.0),
            tensor(seed + 2, length, kv_heads, dim),
        )

    def output(self, position: int, window: int) -> Tensor:
        """What the attention of the token at `position` must be, [H, D]."""
        seen = range(max(0, position + 1 - window), position + 1)
        keys = torch.stack([turned(self.keys[p], p) for p in seen])  # [S, Hkv, D]
        query, values = turned(self.queries[position], position), self.values[list(seen)].double()
        group = query.shape[0] // keys.shape[1]
        rows = [
            (keys[:, head // group] @ q / math.sqrt(len(q))).softmax(0) @ values[:, head // group]
            for head, q in enumerate(query)
        ]
        return torch.stack(rows).float()


def memory(kv_heads: int, window: int, dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a new ring, NaN everywhere."""
    keys = torch.full((kv_heads, window, dim), math.nan)
    return keys, keys.clone()


READ = "what a slot holds before it is written. Attend to the slots in use only."
MISSED = "what it held at first. Write into the memory you were given, not into one of your own."


def agree(got: Any, want: Tensor, what: str, case: str, why: str = READ) -> None:
    """`got` is a float32 tensor equal to `want`; NaN gets the sentence it deserves."""
    about = f"{what} ({case}): "
    if type(got) is Tensor and got.dtype == torch.float32:
        nan = bool(got.isnan().any())
        expect(not nan, f"{about}there is NaN in it, which is {why}", (nan, tuple(got.shape)))
    elif type(got) is Tensor:
        expect(
            False,
            f"{about}it is {got.dtype}; queries, keys and values are torch.float32, and so is "
            f"what comes out.",
            str(got.dtype),
        )
    elif type(got) in (list, tuple, float, int):
        kind = type(got).__name__
        expect(False, f"{about}got a {kind}; return a Tensor, with all heads of the query.", kind)
    close(got, want, what, case, rtol=1e-3, atol=1e-4)
    expect(type(got) is Tensor, f"{about}got {describe(got)}; return a plain Tensor.")


def ask(cache: Any, query: Tensor) -> Any:
    """Attend for the newest token; what came out."""
    mine = query.clone()
    got = cache.attend(mine)
    expect(
        torch.equal(mine, query),
        "attend has changed the query it was given: does it compute in place (*=, /=, a function "
        "whose name ends in _)? Make new tensors.",
    )
    return got


def follow(
    impl: Any, text: Text, pieces: Sequence[int], window: int, what: str
) -> tuple[Tensor, Tensor]:
    """A text in pieces through a ring, compared after each of them; the ring's memory."""
    given = memory(text.keys.shape[1], window, text.keys.shape[2])
    cache, end = impl.RingCache(*given), 0
    for size in pieces:
        start, end = end, end + size
        cache.append(text.keys[start:end].clone(), text.values[start:end].clone())
        got = ask(cache, text.queries[end - 1])
        case = f"{text.queries.shape[1]} heads on {text.keys.shape[1]}, W={window}"
        case += f", pieces {list(pieces)}, query at position {end - 1}"
        agree(got, text.output(end - 1, window), what, case)
    return given


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Equal scores: the mean of the latest four values, and before that of all."""
    cache = impl.RingCache(*memory(1, 4, 2))
    cache.append(torch.zeros(6, 1, 2), torch.arange(1.0, 7.0)[:, None, None].repeat(1, 1, 2))
    agree(ask(cache, torch.zeros(1, 2)), torch.full((1, 2), 4.5), "The values 1 to 6", "W=4")


@check(1, "A first token")
def test_first(impl: Any) -> None:
    """It sees itself: its own value comes out."""
    follow(impl, Text.random(10, 1, 4, 2, 4), [1], 3, "A text of one token")


@check(2, "A text shorter than the window")
def test_short(impl: Any) -> None:
    """Slots are left over."""
    follow(impl, Text.random(20, 5, 6, 2, 4), [1] * 5, 7, "One token at a time")


@check(2, "Three times round the ring, one token at a time")
def test_round(impl: Any) -> None:
    """Each token replaces the one that has left the window."""
    follow(impl, Text.random(30, 17, 4, 2, 6), [1] * 17, 5, "One token at a time")


@check(2, "A prompt longer than the window")
def test_long_prompt(impl: Any) -> None:
    """The latest W tokens remain, each in its own slot."""
    follow(impl, Text.random(40, 16, 4, 2, 4), [11, 1, 1, 3], 4, "A prompt of 11, then more")


@check(2, "Pieces of every size")
def test_pieces(impl: Any) -> None:
    """Pieces that end in the middle of the ring, exactly at its end, and beyond it."""
    sizes = [3, 2, 1, 4, 5, 6, 7, 10, 1, 5]
    follow(impl, Text.random(50, sum(sizes), 6, 3, 4), sizes, 5, "Pieces of every size")


@check(2, "The caller's memory")
def test_memory(impl: Any) -> None:
    """Position p in slot p % W: rotated keys, and values as they came."""
    text = Text.random(60, 15, 4, 2, 4)
    keys, values = follow(impl, text, [2, 1, 9, 1, 1, 1], 4, "Before looking into the memory")
    for position in range(11, 15):
        slot, case = position % 4, f"position {position} of 15, slot {position % 4} of 4"
        agree(values[:, slot], text.values[position], "The value in the memory", case, MISSED)
        want = turned(text.keys[position], position).float()
        agree(keys[:, slot], want, "The rotated key in the memory", case, MISSED)


@check(2, "Twelve random rings")
def test_everything(impl: Any) -> None:
    """Random shapes, windows and pieces."""
    for seed in seeds(12):
        draw = random.Random(seed)
        kv_heads, group, half = (draw.randint(1, 3) for _ in range(3))
        window, sizes = draw.randint(1, 6), [draw.randint(1, 9) for _ in range(6)]
        text = Text.random(seed, sum(sizes), kv_heads * group, kv_heads, 2 * half)
        follow(impl, text, sizes, window, "A random ring")
