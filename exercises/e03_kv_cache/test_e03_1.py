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


READ = (
    "what a slot holds before it is written, or the result of a softmax over no slot. Each "
    "query sees the slots in use up to its own, its own included."
)
MISSED = "what it held at first. Write into the memory you were given, not into one of your own."
GROWN = "After a refused append the row no longer works: has its length changed?"


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
        expect(False, f"{about}got a {kind}; return a Tensor, with all heads of all queries.", kind)
    close(got, want, what, case, rtol=1e-4, atol=1e-5)
    expect(type(got) is Tensor, f"{about}got {describe(got)}; return a plain Tensor.")


def feed(cache: Any, row: int, text: Text, start: int, end: int, slots: int) -> Any:
    """Append tokens start to end - 1 of a text, which fit, and attend for them; what came out."""
    store(cache, row, text, start, end, slots)
    return ask(cache, row, text, start, end)


def store(cache: Any, row: int, text: Text, start: int, end: int, slots: int) -> None:
    """Append tokens that fit into the row's `slots`."""
    try:
        cache.append(row, text.keys[start:end].clone(), text.values[start:end].clone())
    except ValueError as error:
        expect(
            False,
            f"{counted(end - start, 'token')} into the {counted(slots - start, 'slot')} left of "
            f"{slots}: they fit, but append refused them with ValueError: {error}",
            "refused what fits",
        )


def ask(cache: Any, row: int, text: Text, start: int, end: int) -> Any:
    """Attend for the last tokens, start to end - 1; what came out."""
    queries = text.queries[start:end].clone()
    got = cache.attend(row, queries)
    expect(
        torch.equal(queries, text.queries[start:end]),
        "attend has changed the queries it was given: does it compute in place (*=, /=, a function "
        "whose name ends in _)? Make new tensors.",
    )
    return got


def counted(number: int, noun: str) -> str:
    """``1 token``, ``2 tokens``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def follow(impl: Any, text: Text, pieces: Sequence[int], slots: int, what: str) -> None:
    """A text in pieces, in a cache of its own, compared after each of them."""
    cache = impl.KVCache(*memory(1, text.keys.shape[1], slots, text.keys.shape[2]))
    wanted, start = text.outputs(), 0
    for size in pieces:
        got = feed(cache, 0, text, start, start + size, slots)
        case = f"tokens {start} to {start + size - 1} in a row of {slots} slots"
        agree(got, wanted[start : start + size], what, case)
        start += size


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Equal scores: the mean of the values so far."""
    text = Text(torch.zeros(2, 1, 1), torch.zeros(2, 1, 1), torch.tensor([[[1.0]], [[3.0]]]))
    cache = impl.KVCache(*memory(1, 1, 2, 1))
    for start in (0, 1):
        store(cache, 0, text, start, start + 1, 2)
    agree(ask(cache, 0, text, 1, 2), torch.full((1, 1, 1), 2.0), "1, then 3", "D = 1")


@check(2, "A prompt that fills a row")
def test_prompt(impl: Any) -> None:
    """Nothing is cached before it, and no slot is left over."""
    follow(impl, Text.random(10, 5, 6, 2, 4), [5], 5, "A prompt of 5, with 6 heads on 2")


@check(2, "One token at a time, in a row with room")
def test_one_by_one(impl: Any) -> None:
    """One query sees all that is stored, and no unwritten slot."""
    follow(impl, Text.random(20, 7, 4, 4, 3), [1] * 7, 9, "One token at a time")


@check(2, "Pieces of several tokens after others")
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
        got = feed(cache, row, texts[row], start, end, 8)
        case = f"request {row}, its tokens {start} to {end - 1}"
        agree(got, wanted[row][start:end], "Three requests in turn", case)
        done[row] = end


@check(2, "A full row")
def test_full(impl: Any) -> None:
    """What does not fit raises and leaves the row as it was; what fits still fits."""
    text, given = Text.random(70, 9, 4, 2, 4), memory(2, 2, 7, 4)
    cache, wanted = impl.KVCache(*given), text.outputs()
    for row in (0, 1):
        agree(feed(cache, row, text, 0, 5, 7), wanted[:5], "A row with room", "5 tokens, 7 slots")
    last = ask(cache, 0, text, 4, 5)
    agree(last, wanted[4:5], "A row with room", "its last token asked again")
    for count in (3, 4):
        refuses(cache, given, text, 5, 5 + count)
    got = feed(cache, 0, text, 5, 7, 7)
    agree(got, wanted[5:7], "The last two slots after a refusal", "tokens 5 and 6")
    refuses(cache, given, text, 7, 8)
    agree(feed(cache, 1, text, 5, 6, 7), wanted[5:6], "The other row", "token 5, room for two")


def refuses(cache: Any, given: tuple[Tensor, Tensor], text: Text, start: int, end: int) -> None:
    """Appending to row 0, which holds `start` tokens, raises ValueError and changes nothing."""
    before, slots = [part.clone() for part in given], given[0].shape[2]
    case = f"{counted(end - start, 'token')} into the {counted(slots - start, 'slot')} left"
    case += f" of {slots}"
    try:
        cache.append(0, text.keys[start:end].clone(), text.values[start:end].clone())
    except ValueError:
        observe("refused")
    except Exception as error:
        expect(
            False,
            f"{case}: append raised {type(error).__name__} ({error}) by accident; check the room "
            f"first and raise ValueError.",
            type(error).__name__,
        )
    else:
        expect(
            False,
            f"{case}: append returned as if all were well. A token that is dropped in silence is "
            f"a wrong text later: raise ValueError.",
            "not refused",
        )
    unchanged(given, before, case)
    works(cache, text, start, case)


def unchanged(given: Sequence[Tensor], before: Sequence[Tensor], case: str) -> None:
    """No slot of the memory holds anything else than before."""
    written = set()
    for now, then in zip(given, before, strict=True):
        alike = (now == then) | (now.isnan() & then.isnan())  # [B, Hkv, S, D]
        written |= {(row, slot) for row, _, slot, _ in (~alike).nonzero().tolist()}
    places = ", ".join(f"slot {slot} of row {row}" for row, slot in sorted(written))
    expect(
        not written,
        f"{case}: append raised ValueError, but had already written into {places}. Check the room "
        f"before anything else.",
        places,
    )


def works(cache: Any, text: Text, length: int, case: str) -> None:
    """The last of `length` tokens in row 0 comes out as it did before a refusal.

    Whatever goes wrong is observed alike: the length has changed, and the rest follows from it.
    """
    want = text.outputs()[length - 1 : length]
    try:
        got = cache.attend(0, text.queries[length - 1 : length].clone())
    except Exception as error:
        said = f"attend raised {type(error).__name__} ({error})"
    else:
        if same(got, want):
            observe("works")
            return
        said = f"attend gave {describe(got)} instead of {describe(want)}"
    expect(False, f"{GROWN} ({case}; its last token asked again: {said}.)", "grown")


def same(got: Any, want: Tensor) -> bool:
    """Whether `got` is a tensor of this shape and, within rounding, of these values."""
    if type(got) is not Tensor or got.shape != want.shape or got.dtype != want.dtype:
        return False
    return torch.allclose(got, want, rtol=1e-4, atol=1e-5)


@check(1, "The keys in the caller's memory")
def test_memory_keys(impl: Any) -> None:
    """Slot p holds position p; the other slots are still NaN."""
    stored(impl, 0)


@check(1, "The values in the caller's memory")
def test_memory_values(impl: Any) -> None:
    """Slot p holds position p; the other slots are still NaN."""
    stored(impl, 1)


def stored(impl: Any, which: int) -> None:
    """What is in the keys (0) or the values (1) of a memory; what comes out is no matter here."""
    text, given = Text.random(80, 6, 4, 2, 3), memory(2, 2, 6, 3)
    cache = impl.KVCache(*given)
    for start, end in ((0, 3), (3, 4)):
        feed(cache, 1, text, start, end, 6)
    name, new = (("keys", text.keys), ("values", text.values))[which]
    kept = given[which]
    agree(kept[1, :, :4], new[:4].transpose(0, 1), f"The {name}", "row 1, slots 0-3", MISSED)
    unused = torch.cat((kept[0].flatten(), kept[1, :, 4:].flatten()))
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
            got = feed(cache, row, texts[row], start, end, slots)
            case = (
                f"B={rows}, H={heads}, Hkv={kv_heads}, D={dim}, S={slots}, request {row}, "
                f"tokens {start} to {end - 1}"
            )
            agree(got, wanted[row][start:end], "A random cache", case)
