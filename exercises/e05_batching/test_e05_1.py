"""The public checks of e05.1: each table alone, then a model that reads all three."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds

VOCAB, WIDTH, LAYERS = 60, 3, 2
Table = list[list[Any]]
Vectors = list[list[float]]


@dataclass
class Truth:
    """What a batch must hold by now: the ids of each row, and which of its slots are text."""

    ids: list[list[int]]
    text: list[list[bool]]
    done: list[str] = field(default_factory=list)  # the calls so far

    @classmethod
    def of(cls, prompts: list[list[int]], pad: int) -> "Truth":
        """After the constructor."""
        size = max(len(prompt) for prompt in prompts)
        return cls(
            [[pad] * (size - len(prompt)) + prompt for prompt in prompts],
            [[False] * (size - len(prompt)) + [True] * len(prompt) for prompt in prompts],
            [f"Batch({prompts}, {pad})"],
        )

    def append(self, tokens: list[int | None], pad: int) -> None:
        """After one more slot."""
        for ids, text, token in zip(self.ids, self.text, tokens, strict=True):
            ids.append(pad if token is None else token)
            text.append(token is not None)
        self.done.append(f"append({tokens})")

    @property
    def case(self) -> str:
        """The calls that show it."""
        return ", ".join(self.done)

    @property
    def size(self) -> int:
        """Slots of a row."""
        return len(self.ids[0])

    def row(self, row: int) -> list[int]:
        """The slots of a row that hold text."""
        return [slot for slot, is_text in enumerate(self.text[row]) if is_text]


@dataclass(frozen=True)
class Story:
    """A batch to build: its prompts, and what is appended."""

    prompts: list[list[int]]
    pad: int
    appended: list[list[int | None]]

    def play(self, impl: Any) -> Iterator[tuple[Any, Truth]]:
        """The learner's batch and the truth, after the constructor and after every append."""
        truth = Truth.of(self.prompts, self.pad)
        batch = impl.Batch([list(prompt) for prompt in self.prompts], self.pad)
        yield batch, truth
        for tokens in self.appended:
            batch.append(list(tokens))
            truth.append(tokens, self.pad)
            yield batch, truth


HAND = Story([[5, 6, 7], [8]], 0, [[9, 4], [None, 3]])
THREE = Story([[11, 12], [21, 22, 23, 24, 25], [31, 32, 33]], 0, [[13, 26, 34], [14, 27, 35]])
ENDING = Story(
    [[11, 12, 13], [21], [31, 32]],
    0,
    [[14, 22, None], [None, 23, None], [None, 24, None], [None, None, None]],
)
PAD_AS_TEXT = Story([[7, 11, 7], [7], [7, 7]], 7, [[7, 12, 7], [13, 7, None], [7, 14, None]])


def table(value: Any, truth: Truth, name: str) -> Table:
    """A table of the learner's, if it has B rows of S entries."""
    case = f"{name} after {truth.case}"
    rows = accept(value, "What the batch holds", case)
    good = type(rows) in (list, tuple) and all(type(row) in (list, tuple) for row in rows)
    shape = [len(row) for row in rows] if good else []
    want = [truth.size] * len(truth.ids)
    expect(
        good and shape == want,
        f"{case}: expected {len(want)} rows of {truth.size} slots each, got "
        + (f"rows of {shape} slots." if good else f"{rows!r:.60}, which is no list of lists."),
        (name, good, shape),
    )
    return [list(row) for row in rows]


def right_ids(batch: Any, truth: Truth) -> None:
    """Text where it belongs, and pads in the other slots."""
    for row, got in enumerate(table(batch.ids, truth, "ids")):
        equal(got, truth.ids[row], f"The ids of row {row}", truth.case)


def right_positions(batch: Any, truth: Truth) -> None:
    """The texts count from 0; a pad's position is only held to the size of a table."""
    for row, got in enumerate(table(batch.positions, truth, "positions")):
        slots = truth.row(row)
        what = f"The positions of row {row}'s text, which is in the slots {slots}"
        equal([got[slot] for slot in slots], list(range(len(slots))), what, truth.case)
        for slot, position in enumerate(got):
            expect(
                type(position) is int and 0 <= position < truth.size,
                f"positions after {truth.case}: the pad in slot {slot} of row {row} has position "
                f"{position!r}; a table of positions has rows 0 to {truth.size - 1} here.",
                ("pad's position", position),
            )


def seen(batch: Any, truth: Truth) -> list[list[list[bool]]]:
    """The learner's mask, if it is B squares of bools."""
    squares = []
    for row, square in enumerate(table(batch.mask, truth, "mask")):
        case = f"mask after {truth.case}, row {row}"
        good = [type(line) in (list, tuple) and len(line) == truth.size for line in square]
        expect(
            all(good),
            f"{case}: expected {truth.size} lists, one per query, of {truth.size} "
            f"bools, one per key.",
            ("square", good),
        )
        kinds = {type(value).__name__ for line in square for value in line}
        expect(
            kinds == {"bool"},
            f"{case}: expected True and False, got {sorted(kinds)}.",
            sorted(kinds),
        )
        squares.append([list(line) for line in square])
    return squares


def right_mask(batch: Any, truth: Truth) -> None:
    """Every text token sees the text up to itself, every pad sees something."""
    for row, square in enumerate(seen(batch, truth)):
        for query, line in enumerate(square):
            said, kind = wrong_line(truth.text[row], query, line)
            observed = line if truth.text[row][query] else any(line)
            expect(not said, f"Row {row} {said} (mask after {truth.case}).", (observed, kind))


def wrong_line(text: list[bool], query: int, line: list[bool]) -> tuple[str, str]:
    """What is wrong with what one query sees, in words and in one word; empty if nothing is."""
    if not any(line):
        kind = "token" if text[query] else "pad"
        return (
            f"has a {kind} in slot {query} that sees nothing: a softmax over nothing is NaN, which "
            f"reaches the text in the next layer as 0 times NaN",
            "nothing",
        )
    if not text[query]:
        return "", ""
    for key, sees in enumerate(line):
        if sees and key > query:
            return f"looks ahead: its token in slot {query} sees slot {key}", "ahead"
        if sees and not text[key]:
            return f"sees pad as text: its token in slot {query} sees the pad in slot {key}", "pad"
        if not sees and key == query:
            return f"does not see itself: its token in slot {query}", "itself"
        if not sees and key < query and text[key]:
            return f"misses text: its token in slot {query} does not see slot {key}", "text"
    return "", ""


def right_count(batch: Any, truth: Truth) -> None:
    """Pads, and slots."""
    flags = [flag for text in truth.text for flag in text]
    want = (flags.count(False), len(flags))
    equal(batch.wasted(), want, "wasted(): pads, and all slots", truth.case)


def follow(impl: Any, story: Story, *asked: Callable[[Any, Truth], None]) -> None:
    """Ask all of `asked` after the constructor and after every append."""
    for batch, truth in story.play(impl):
        for question in asked:
            question(batch, truth)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two rows, two appends, of which the second finds one row ended."""
    follow(impl, HAND, right_ids, right_positions, right_mask, right_count)


@check(1, "The ids: pads on the left, the newest token last")
def test_ids(impl: Any) -> None:
    """Three prompts, of which one needs no pad; then one prompt alone."""
    follow(impl, THREE, right_ids)
    follow(impl, Story([[11, 12]], 9, [[13]]), right_ids)


@check(2, "The positions: those of the text")
def test_positions(impl: Any) -> None:
    """Pads do not count, before an append and after it."""
    follow(impl, THREE, right_positions)


@check(2, "The mask: earlier text and itself, no other pad")
def test_mask(impl: Any) -> None:
    """The same three rows, and one without pads."""
    follow(impl, Story([[11, 12, 13]], 0, [[14]]), right_mask)
    follow(impl, THREE, right_mask)


@check(2, "Rows that have ended")
def test_ended(impl: Any) -> None:
    """One row ends at once, one later, one last."""
    follow(impl, ENDING, right_ids, right_positions, right_mask)


@check(1, "Text that contains the pad's id")
def test_pad_as_text(impl: Any) -> None:
    """It stands in prompts, alone in one, and among the tokens appended."""
    follow(impl, PAD_AS_TEXT, right_ids, right_positions, right_mask, right_count)


@check(1, "The number of wasted slots")
def test_wasted(impl: Any) -> None:
    """At the beginning, and when rows end."""
    for story in (Story([[11, 12]], 0, [[13]]), THREE, ENDING):
        follow(impl, story, right_count)


@check(1, "The caller's lists do not change")
def test_lists(impl: Any) -> None:
    """Prompts and tokens after a whole story, of which the result is looked at as well."""
    prompts, tokens = [[11, 12], [21]], [13, None]
    truth = Truth.of([[11, 12], [21]], 0)
    batch = impl.Batch(prompts, 0)
    batch.append(tokens)
    truth.append([13, None], 0)
    equal(prompts, [[11, 12], [21]], "The list of prompts", f"after {truth.case}")
    equal(tokens, [13, None], "The list of tokens", f"after {truth.case}")
    last = [ids[-1:] for ids in accept(batch.ids, "ids", truth.case)]
    equal(last, [[13], [0]], "The last slot of each row", truth.case)


def entries(name: str, rows: int) -> Vectors:
    """Fixed numbers between -1 and 1, the same on every machine."""
    draw = random.Random(name)
    return [[draw.uniform(-1, 1) for _ in range(WIDTH)] for _ in range(rows)]


TOKENS, PLACES = entries("tokens", VOCAB), entries("places", 64)
QUERIES, KEYS, VALUES = (entries(name, WIDTH * LAYERS) for name in ("q", "k", "v"))


def project(vectors: Vectors, matrix: Vectors) -> Vectors:
    """Each vector times a matrix."""
    return [
        [sum(x * w for x, w in zip(vector, column, strict=True)) for column in matrix]
        for vector in vectors
    ]


def attend(vectors: Vectors, mask: list[list[bool]], layer: int) -> Vectors:
    """One layer: what each slot sees, weighted, and added to it."""
    part = slice(layer * WIDTH, (layer + 1) * WIDTH)
    queries, keys, values = (project(vectors, m[part]) for m in (QUERIES, KEYS, VALUES))
    result = []
    for query, line in enumerate(mask):
        scores = [sum(map(lambda q, k: 4 * q * k, queries[query], key)) for key in keys]
        weights = [math.exp(s) if sees else 0.0 for s, sees in zip(scores, line, strict=True)]
        total = sum(weights)
        shares = [weight / total if total else math.nan for weight in weights]
        # As a matrix product does it: a slot that is not seen is multiplied by 0, and added.
        mean = [sum(s * v[i] for s, v in zip(shares, values, strict=True)) for i in range(WIDTH)]
        result.append([math.tanh(x + m) for x, m in zip(vectors[query], mean, strict=True)])
    return result


def compute(ids: list[int], positions: list[int], mask: list[list[bool]]) -> Vectors:
    """A small model of two layers with a table of positions, as GPT-2 has one."""
    vectors = [
        [t + p for t, p in zip(TOKENS[token], PLACES[place], strict=True)]
        for token, place in zip(ids, positions, strict=True)
    ]
    for layer in range(LAYERS):
        vectors = attend(vectors, mask, layer)
    return vectors


def alone(text: list[int]) -> Vectors:
    """What the model makes of a text without any batch."""
    slots = range(len(text))
    return compute(text, list(slots), [[key <= query for key in slots] for query in slots])


def comes_out(batch: Any, truth: Truth) -> None:
    """Every row's text, computed from the learner's tables, is what it is alone."""
    ids, positions = (table(getattr(batch, n), truth, n) for n in ("ids", "positions"))
    masks = seen(batch, truth)
    numbers = [
        value
        for rows, end in ((ids, VOCAB), (positions, len(PLACES)))
        for value in (value for row in rows for value in row)
        if type(value) is not int or not 0 <= value < end
    ]
    expect(
        not numbers,
        f"ids or positions after {truth.case}: {numbers[:1]} is no row of the model's tables.",
        numbers,
    )
    for row, (mine, mask) in enumerate(zip(ids, masks, strict=True)):
        slots = truth.row(row)
        got = compute(mine, positions[row], mask)
        want = alone([truth.ids[row][slot] for slot in slots])
        far = [at for at, slot in enumerate(slots) if not near(got[slot], want[at])]
        why = reason(batch, truth, row) if far else ""
        expect(
            not far,
            f"Row {row} comes out differently in the batch than alone, first its token "
            f"{min(far, default=0)} ({truth.case}). {why}",
            (row, far, why),
        )


def near(one: list[float], other: list[float]) -> bool:
    """Equal within rounding; NaN never is."""
    return all(abs(a - b) < 1e-9 for a, b in zip(one, other, strict=True))


def reason(batch: Any, truth: Truth, row: int) -> str:
    """What is wrong with the row's tables, as far as one can see."""
    if list(batch.ids[row]) != truth.ids[row]:
        return "Its ids are not where they belong: pads on the left."
    for query, line in enumerate(batch.mask[row]):
        said, _ = wrong_line(truth.text[row], query, line)
        if said:
            return f"It {said}."
    return "Its positions are not those of the text."


@check(2, "A model that reads your batch")
def test_model(impl: Any) -> None:
    """Each row comes out as it does alone, whatever stands beside it."""
    for story in (THREE, ENDING):
        follow(impl, story, comes_out)


@check(2, "Twenty random batches")
def test_everything(impl: Any) -> None:
    """Random prompts, ends and pads, some of them with the pad's id in the text."""
    for seed in seeds(20):
        draw = random.Random(seed)
        pad, rows = draw.randrange(10), draw.randint(1, 4)
        prompts = [[draw.randrange(10) for _ in range(draw.randint(1, 6))] for _ in range(rows)]
        lasts = [draw.randint(0, 4) for _ in range(rows)]
        appended: list[list[int | None]] = [
            [draw.randrange(10) if step < last else None for last in lasts] for step in range(4)
        ]
        story = Story(prompts, pad, appended[: draw.randint(1, 4)])
        follow(impl, story, right_ids, right_positions, right_mask, right_count, comes_out)
