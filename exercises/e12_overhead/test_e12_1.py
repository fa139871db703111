"""The public checks of e12.1: a device that counts, and texts whose every token depends on all
that was read."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from minillm_exercises.checking import accept, check, equal, expect, number, seeds

VOCABULARY = 997
NUMBER = 8  # bytes of a number in a buffer
SCRATCH = 1000  # bytes that a captured row needs besides
NOTHING = -997  # what a row without a text draws
GARBAGE = 2  # what a new buffer is full of: a token, a slot, a table and a length like any other
FIELDS = ("tokens", "slots", "tables", "lengths", "out")


class Row(NamedTuple):
    """As in the starter."""

    token: int
    slot: int
    table: int
    length: int


def draw(text: Sequence[int | None]) -> int:
    """The token after a text: another one whenever anything in it is another."""
    state = 1
    for token in text:
        state = (state * 31 + (500_009 if token is None else token) + 7) % 1_000_003
    return state % VOCABULARY


# ---- the device -------------------------------------------------------------------------------


class Device:
    """What a submission sees of the laboratory: four methods."""

    def __init__(self, lab: "Laboratory") -> None:
        self.buffer, self.capture = lab.buffer, lab.capture
        self.replay, self.eager = lab.replay, lab.eager


class Laboratory:
    """A cache, texts in it, a device that writes down what it does, and a decoder under test."""

    def __init__(
        self, impl: Any, sizes: Sequence[int], num_slots: int = 64, captures: bool = True
    ) -> None:
        """With `captures`, compare what making the decoder did."""
        self.sizes = list(sizes)
        self.cache: list[int | None] = [None] * num_slots
        self.free = random.Random(num_slots).sample(range(num_slots), num_slots)
        self.tables: list[list[int]] = []
        self.texts: dict[str, list[int]] = {}
        self.where: dict[str, int] = {}  # the number of each text's table
        self.story: list[str] = []
        self.graphs: list[tuple[int, tuple[list[int], ...]]] = []
        self.buffers: list[tuple[list[int], int]] = []
        self.bytes = self.scratch = 0
        self.launches: list[str] = []  # since the last step
        self.ran: list[Row] = []
        for name in "xyz":  # texts of others, in the first slots, too
            self.begin(name, [5, 6, 7, 8])
        cache = list(self.cache)
        self.decoder = impl.Decoder(Device(self), list(sizes))
        if captures:
            self.captured(cache)
        self.launches, self.ran = [], []

    # ---- what the device does ------------------------------------------------------------

    def buffer(self, rows: int) -> list[int]:
        """Return memory that holds arbitrary numbers."""
        number(rows, "The rows of a buffer", self.case)
        self.bytes += NUMBER * rows
        made = [GARBAGE] * rows
        self.buffers.append((made, rows))
        return made

    def capture(self, size: int, *buffers: list[int]) -> int:
        """Run once and record."""
        number(size, "The size of a capture", self.case)
        self.need(len(buffers) == 5, "five", "capture takes a size and five buffers.")
        for name, buffer in zip(FIELDS, buffers, strict=True):
            own = [rows for made, rows in self.buffers if made is buffer]
            message = f"capture({size}, ...): `{name}` is no memory of this device: use buffer()."
            self.need(own, "own", message)
            message = f"capture({size}, ...): the buffer for `{name}` has {own and own[0]} rows."
            self.need(own[0] >= size, "room", message)
        if size > self.scratch:  # what is there is too small, and stays: a graph points to it
            self.bytes += SCRATCH * size
            self.scratch = size
        self.graphs.append((size, buffers))
        self.replay(len(self.graphs) - 1)
        return len(self.graphs) - 1

    def replay(self, graph: int) -> None:
        """One launch over what is in the buffers."""
        known = type(graph) is int and 0 <= graph < len(self.graphs)
        self.need(known, "graph", f"replay({graph!r}): capture returned no such number.")
        size, buffers = self.graphs[graph]
        for made, rows in self.buffers:
            message = f"A buffer of {rows} rows has {len(made)} now: write into it only."
            self.need(len(made) == rows, "resized", message)
        rows = [Row(*row) for row in zip(*(list(b[:size]) for b in buffers[:4]), strict=True)]
        self.launches.append(f"a graph of {size}")
        buffers[4][:size] = self.compute(rows)

    def eager(self, rows: Sequence[Any]) -> list[int]:
        """Hundreds of launches."""
        given = [Row(*row) for row in rows]
        self.launches.append(f"{len(given)} rows without a graph")
        return self.compute(given)

    def compute(self, rows: list[Row]) -> list[int]:
        """Every row writes, then every row reads."""
        for at, row in enumerate(rows):
            accept(list(row), f"Row {at} of the step", self.case)
            message = f"Row {at} of the step has the token {row.token}: there are {VOCABULARY}."
            self.need(0 <= row.token < VOCABULARY, "token", message)
            message = f"Row {at} writes to slot {row.slot}: there are {len(self.cache)}."
            self.need(-1 <= row.slot < len(self.cache), "slot", message)
            message = f"Row {at} has a length of {row.length}."
            self.need(row.length >= 0, "length", message)
            if row.length:
                known = 0 <= row.table < len(self.tables)
                message = f"Row {at} reads {row.length} slots of table {row.table}: no such memory."
                self.need(known, "table", message)
                self.need(row.length <= len(self.tables[row.table]), "table", message)
        for row in rows:
            if row.slot >= 0:
                self.cache[row.slot] = row.token
        self.ran += rows
        return [
            draw([self.cache[slot] for slot in self.tables[row.table][: row.length]])
            if row.length
            else NOTHING
            for row in rows
        ]

    def need(self, condition: object, kind: str, message: str) -> None:
        """End the check at something that a device cannot do."""
        if not condition:
            expect(False, f"{message} ({self.case})", ("device", kind))

    # ---- texts ---------------------------------------------------------------------------

    @property
    def case(self) -> str:
        """How to repeat it."""
        return "; ".join([f"sizes {self.sizes}", *self.story[-5:]])

    def begin(self, name: str, prompt: Sequence[int]) -> None:
        """A text whose prompt is in the cache, but for the last token."""
        self.texts[name], self.where[name] = list(prompt), len(self.tables)
        self.tables.append([self.free.pop(0) for _ in range(12)])
        for slot, token in zip(self.tables[-1], prompt[:-1], strict=False):
            self.cache[slot] = token

    def end(self, *names: str) -> None:
        """End texts; their slots are given out again next."""
        for name in names:
            del self.texts[name]
            self.free = self.tables[self.where.pop(name)] + self.free

    def row(self, name: str) -> Row:
        """What a text brings into its next step."""
        text, table = self.texts[name], self.where[name]
        return Row(text[-1], self.tables[table][len(text) - 1], table, len(text))

    # ---- what is compared ----------------------------------------------------------------

    def captured(self, cache: list[int | None]) -> None:
        """After the decoder was made."""
        sizes = sorted(size for size, _ in self.graphs)
        equal(sizes, self.sizes, "The sizes of the captured graphs", self.case)
        changed = [slot for slot, token in enumerate(self.cache) if token != cache[slot]]
        read = sum(row.length for row in self.ran)
        message = f"capturing runs the step, and wrote into slots {changed}"
        self.seen(not changed, ("wrote", changed, read), message, "Making the decoder")
        message = f"capturing runs the step, and {read} tokens were read"
        self.seen(not read, ("read", read), message, "Making the decoder")
        largest = self.sizes[-1]
        most = largest * (5 * NUMBER + SCRATCH)
        message = (
            f"{self.bytes:,} bytes were taken; five buffers of {largest} numbers, {NUMBER} bytes "
            f"each, and scratch memory for {largest} rows of {SCRATCH} bytes are {most:,}"
        )
        self.seen(self.bytes <= most, ("bytes", self.bytes), message, "Making the decoder")

    def step(self, what: str, names: Sequence[str]) -> Any:
        """One step of these texts: the tokens, the launches, and what padding did."""
        rows = [self.row(name) for name in names]
        given = [Row(*row) for row in rows]
        self.launches, self.ran = [], []
        self.story.append(f"a step of {len(rows)}")
        taken = self.bytes
        got = accept(self.decoder.step(given), f"{what}: the tokens", self.case)
        equal([list(r) for r in given], [list(r) for r in rows], f"{what}: `rows` after the call")
        fits = [size for size in self.sizes if size >= len(rows)]
        want = [f"a graph of {fits[0]}"] if fits else [f"{len(rows)} rows without a graph"]
        equal(self.launches, want if rows else [], f"{what}: the launches", self.case)
        equal(self.bytes, taken, f"{what}: bytes of buffers, none of them new", self.case)
        self.padding(what, rows)
        wanted = [draw(self.texts[name]) for name in names]
        equal(got, wanted, f"{what}: the tokens", self.case)
        for name, token in zip(names, wanted, strict=True):
            self.texts[name].append(token)
        return got

    def padding(self, what: str, rows: list[Row]) -> None:
        """Compare what the rows of padding wrote and read: nothing is allowed."""
        missing = list((Counter(rows) - Counter(self.ran)).elements())
        message = (
            f"{missing and missing[0]} was in the batch and was not run; the step ran {self.ran}"
        )
        self.seen(not missing, ("missing", len(missing)), message, what)
        extra = list((Counter(self.ran) - Counter(rows)).elements())
        wrote = [row for row in extra if row.slot >= 0]
        read = sum(row.length for row in extra)
        done = ([row.slot for row in wrote], read)  # both, for they are different mistakes
        words = [f"token {row.token} into slot {row.slot}{self.owner(row.slot)}" for row in wrote]
        message = f"a row of padding wrote {words and words[0]}"
        self.seen(not wrote, ("wrote", done), message, what)
        self.seen(not read, ("read", done), f"rows of padding read {read} tokens", what)

    def owner(self, slot: int) -> str:
        """Name the text that has this slot."""
        owners = [name for name, table in self.where.items() if slot in self.tables[table]]
        return f", which is a slot of text {owners[0]!r}" if owners else ""

    def seen(self, condition: bool, observed: object, message: str, what: str) -> None:
        """Like `expect`, with the case in it."""
        expect(condition, f"{what} ({self.case}): {message}.", (condition, observed))


def laboratory(impl: Any, sizes: Sequence[int], count: int, captures: bool = True) -> Laboratory:
    """A laboratory in which texts a, b, c ... have begun, with prompts of 2 to 4 tokens."""
    lab = Laboratory(impl, sizes, 12 * (count + 4), captures)
    for at in range(count):
        lab.begin("abcdefghijkl"[at], [11 * at + 1 + n for n in range(2 + at % 3)])
    return lab


# ---- the checks -------------------------------------------------------------------------------


@check(1, "Batches without a graph: too large, or empty")
def test_eager(impl: Any) -> None:
    """Only the steps are compared here; `test_capture` compares what making the decoder did."""
    lab = laboratory(impl, [1, 3], 7, captures=False)
    lab.step("No rows", "")
    lab.step("Four rows, one more than the largest graph holds", "abcd")
    lab.step("Seven rows", "gfedcba")


@check(2, "Capturing touches no text and takes no more memory than needed")
def test_capture(impl: Any) -> None:
    """One size, two, and a ladder."""
    for sizes in ([4], [1, 3], [1, 2, 4, 8]):
        Laboratory(impl, sizes)
    lab = laboratory(impl, [1, 2, 4, 8], 3)
    lab.step("The first step", "abc")


@check(1, "Batches that fill their graph")
def test_full(impl: Any) -> None:
    """No padding, each graph from the smallest on, with new tokens in each step."""
    lab = laboratory(impl, [1, 2, 4], 4)
    for names in ("a", "ab", "cd", "abcd", "dbca"):
        lab.step(f"A batch of {len(names)} in a graph of {len(names)}", names)


@check(2, "Padding writes nothing and reads nothing")
def test_padding(impl: Any) -> None:
    """Into buffers in which nothing was before, then into the remains of a larger batch."""
    lab = laboratory(impl, [2, 5], 5)
    lab.step("Three rows in a graph of 5", "abc")
    lab.step("One row in a graph of 2", "d")
    lab = laboratory(impl, [2, 5], 5)
    lab.step("Five rows in a graph of 5", "abcde")
    lab.step("Three rows in a graph of 5, after a batch of five", "bcd")
    lab.step("One row in a graph of 2, after a batch of three", "e")


@check(2, "Slots that belong to another text by now")
def test_stale(impl: Any) -> None:
    """Texts end, and others begin in their slots; the remains of the old batch are in the buffers
    of a graph that was not used in between."""
    lab = laboratory(impl, [1, 4], 4)
    lab.step("Four rows in a graph of 4", "abcd")
    lab.end("c", "d")
    lab.begin("e", [21, 22, 23, 24, 25, 26])
    lab.begin("f", [31, 32])
    lab.step("One row in a graph of 1", "e")
    lab.step("Three rows in a graph of 4, one of which begins in the slots of an old one", "efb")
    lab.step("One row in a graph of 1", "a")
    lab.step("Two rows in a graph of 4", "ef")
    for name in "xyzabef":
        lab.step(f"Text {name!r} alone: all it reads is its own", name)


@check(2, "The smallest graph that holds the batch, and one launch")
def test_buckets(impl: Any) -> None:
    """Each batch from 1 to 7."""
    lab = laboratory(impl, [1, 3, 4, 7], 7)
    for count in (4, 1, 7, 2, 3, 6, 5):
        lab.step(f"A batch of {count}", "abcdefg"[:count])


@check(1, "Large and empty batches, and a graph after them")
def test_beyond(impl: Any) -> None:
    """A graph is replayed after batches that ran without one."""
    lab = laboratory(impl, [1, 3], 7)
    lab.step("Four rows, one more than the largest graph", "abcd")
    lab.step("Seven rows", "gfedcba")
    lab.step("No rows", "")
    lab.step("Two rows, after larger batches", "ge")


@check(1, "A returned list does not change later")
def test_results(impl: Any) -> None:
    """The next replay writes into the same buffer."""
    lab = laboratory(impl, [1, 2, 3], 6)
    for sizes in ("abc", "ab", "a"):
        got = lab.step(f"A batch of {len(sizes)}", sizes)
        kept = list(got)
        lab.step("Another batch", "def")
        what = f"The tokens of the batch of {len(sizes)}, after one more step"
        equal(list(got), kept, what, lab.case)


@check(2, "Thirty random histories")
def test_everything(impl: Any) -> None:
    """Texts begin, take part in some steps and not in others, and end."""
    for seed in seeds(30):
        rng = random.Random(seed)
        sizes = sorted(rng.sample(range(1, 10), rng.randint(1, 4)))
        lab, names = Laboratory(impl, sizes, 160), iter("abcdefghijklmnopqrstuvw")
        for _ in range(12):
            alive = [name for name in lab.texts if name not in "xyz"]
            done = [n for n in alive if len(lab.texts[n]) > 10 or rng.random() < 0.15]
            lab.end(*done)
            while len(lab.texts) < 12 and rng.random() < 0.6:
                prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 8))]
                name = next(names, "")
                if not name:
                    break
                lab.begin(name, prompt)
            alive = [name for name in lab.texts if name not in "xyz"]
            lab.step("A random history", rng.sample(alive, rng.randint(0, len(alive))))
