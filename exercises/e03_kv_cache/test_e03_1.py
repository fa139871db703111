"""The public checks of e03.1: memory full of NaN, lengths that are no multiples of each other."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minillm_exercises.checking import check, close, describe, expect, observe, seeds, tensor


@dataclass(frozen=True)
class Text:
    """The queries [N, H, D], keys and values [N, Hkv, D] of one request's tokens."""

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

    def outputs(self) -> Tensor:
        """What each token's attention must be, [N, H, D], one query and one head at a time."""
        group = self.queries.shape[1] // self.keys.shape[1]
        rows = []
        for position, query in enumerate(self.queries.double()):
            for head, q in enumerate(query):
                k, v = (x[: position + 1, head // group].double() for x in (self.keys, self.values))
                rows.append((k @ q / math.sqrt(len(q))).softmax(0) @ v)
        return torch.stack(rows).view(self.queries.shape).float()


def memory(rows: int, kv_heads: int, slots: int, dim: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a new cache, NaN everywhere."""
    keys = torch.full((rows, kv_heads, slots, dim), math.nan)
    return keys, keys.clone()


READ = "what a slot holds that nobody has written. Attend to the slots in use only."
MISSED = "what it held at first. Write into the memory you were given, not into one of your own."


def agree(got: Any, want: Tensor, what: str, case: str, why: str = READ) -> None:
    """`got` is `want`; NaN gets the sentence it deserves."""
    if isinstance(got, Tensor) and got.isnan().any():
        expect(
            False,
            f"{what} ({case}): there is NaN in it, which is {why}",
            ("nan", tuple(got.shape)),
        )
    close(got, want, what, case, rtol=1e-4, atol=1e-5)


def feed(cache: Any, row: int, text: Text, start: int, end: int) -> Any:
    """Append tokens start to end - 1 of a text and attend for them; what came out."""
    cache.append(row, text.keys[start:end].clone(), text.values[start:end].clone())
    return cache.attend(row, text.queries[start:end].clone())


def follow(impl: Any, text: Text, pieces: Sequence[int], slots: int, what: str) -> None:
    """A text in pieces, in a cache of its own, compared after each of them."""
    cache = impl.KVCache(*memory(1, text.keys.shape[1], slots, text.keys.shape[2]))
    wanted, start = text.outputs(), 0
    for size in pieces:
        got = feed(cache, 0, text, start, start + size)
        case = f"tokens {start} to {start + size - 1} in a row of {slots} slots"
        agree(got, wanted[start : start + size], what, case)
        start += size


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Equal scores: the mean of the values so far."""
    cache = impl.KVCache(*memory(1, 1, 2, 1))
    for value in (1.0, 3.0):
        cache.append(0, torch.zeros(1, 1, 1), torch.full((1, 1, 1), value))
    agree(cache.attend(0, torch.zeros(1, 1, 1)), torch.full((1, 1, 1), 2.0), "1, then 3", "D = 1")


@check(2, "A prompt that fills a row")
def test_prompt(impl: Any) -> None:
    """Nothing is cached before it, and no slot is left over."""
    follow(impl, Text.random(10, 5, 6, 2, 4), [5], 5, "A prompt of 5, with 6 heads on 2")


@check(2, "One token at a time, in a row with room")
def test_one_by_one(impl: Any) -> None:
    """One query sees all that is stored, and no unwritten slot."""
    follow(impl, Text.random(20, 7, 4, 4, 3), [1] * 7, 9, "One token at a time")


@check(2, "Pieces of several tokens behind others")
def test_pieces(impl: Any) -> None:
    """The first query of a piece stands behind everything stored before it."""
    follow(impl, Text.random(30, 11, 6, 3, 4), [3, 1, 5, 2], 13, "Pieces of 3, 1, 5 and 2")


@check(2, "Requests that take turns")
def test_requests(impl: Any) -> None:
    """Three rows with lengths of their own."""
    texts = [Text.random(40 + 10 * row, 8, 4, 2, 4) for row in range(3)]
    wanted = [text.outputs() for text in texts]
    cache, done = impl.KVCache(*memory(3, 2, 8, 4)), [0, 0, 0]
    for row, size in ((2, 3), (0, 1), (2, 2), (1, 4), (0, 5), (2, 1), (1, 1)):
        start, end = done[row], done[row] + size
        got = feed(cache, row, texts[row], start, end)
        case = f"request {row}, its tokens {start} to {end - 1}"
        agree(got, wanted[row][start:end], "Three requests in turn", case)
        done[row] = end


@check(2, "A row that is full")
def test_full(impl: Any) -> None:
    """What does not fit raises and leaves the row as it was; what fits still fits."""
    text, cache = Text.random(70, 9, 4, 2, 4), impl.KVCache(*memory(2, 2, 7, 4))
    wanted = text.outputs()
    for row in (0, 1):
        feed(cache, row, text, 0, 5)
    for count in (3, 4):
        refuses(cache, 0, text, 5, 5 + count, f"{count} tokens into the 2 slots left of 7")
    got = cache.attend(0, text.queries[4:5].clone())
    agree(got, wanted[4:5], "The row after a refusal", "its last token asked again")
    got = feed(cache, 0, text, 5, 7)
    agree(got, wanted[5:7], "The last two slots after a refusal", "tokens 5 and 6")
    refuses(cache, 0, text, 7, 8, "1 token into a full row of 7 slots")
    agree(feed(cache, 1, text, 5, 6), wanted[5:6], "The other row", "token 5, room for two")


def refuses(cache: Any, row: int, text: Text, start: int, end: int, case: str) -> None:
    """Appending raises ValueError."""
    try:
        cache.append(row, text.keys[start:end].clone(), text.values[start:end].clone())
    except ValueError:
        observe("refused")
        return
    except Exception as error:
        expect(
            False,
            f"{case}: append raised {type(error).__name__} ({error}) by accident; check the room "
            f"first and raise ValueError.",
            type(error).__name__,
        )
    expect(
        False,
        f"{case}: append returned as if all were well. A token that is dropped in silence is a "
        f"wrong text later: raise ValueError.",
        "not refused",
    )


@check(1, "The memory that was given")
def test_memory(impl: Any) -> None:
    """Slot p holds position p; the other slots are still NaN."""
    text, given = Text.random(80, 6, 4, 2, 3), memory(2, 2, 6, 3)
    cache = impl.KVCache(*given)
    for start, end in ((0, 3), (3, 4)):
        agree(
            feed(cache, 1, text, start, end),
            text.outputs()[start:end],
            "Tokens of row 1",
            f"{start} to {end - 1}",
        )
    for name, stored, new in zip(("keys", "values"), given, (text.keys, text.values), strict=True):
        agree(stored[1, :, :4], new[:4].transpose(0, 1), f"The {name}", "row 1, slots 0-3", MISSED)
        unused = torch.cat((stored[0].flatten(), stored[1, :, 4:].flatten()))
        expect(
            unused.isnan().all(),
            f"The {name} of slots that belong to no token are {describe(unused[~unused.isnan()])}; "
            f"only slots 0 to 3 of row 1 were to be written.",
        )


@check(2, "Twelve random caches")
def test_everything(impl: Any) -> None:
    """Random shapes, pieces and turns."""
    for seed in seeds(12):
        draw = random.Random(seed)
        rows, kv_heads, dim, slots = (draw.randint(1, 4) for _ in range(4))
        slots += 4
        heads = kv_heads * draw.randint(1, 3)
        texts = [Text.random(seed + 7 * row, slots, heads, kv_heads, dim) for row in range(rows)]
        wanted = [text.outputs() for text in texts]
        cache, done = impl.KVCache(*memory(rows, kv_heads, slots, dim)), [0] * rows
        while (row := draw.randrange(rows)) is not None and done[row] < slots:
            start = done[row]
            done[row] = end = min(slots, start + draw.randint(1, 4))
            got = feed(cache, row, texts[row], start, end)
            case = (
                f"B={rows}, H={heads}, Hkv={kv_heads}, D={dim}, S={slots}, request {row}, "
                f"tokens {start} to {end - 1}"
            )
            agree(got, wanted[row][start:end], "A random cache", case)
