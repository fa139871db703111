"""The public checks of e12.2: a device that runs a step as late as it may, and reads everything."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from typing import Any

from minillm_exercises.checking import (
    accept,
    check,
    describe,
    equal,
    expect,
    number,
    observe,
    seeds,
)

END = 0
VOCABULARY = 1000
UNWRITTEN = 7777  # what is read where nothing was written


def read(state: int, token: int) -> int:
    """What is left of a text after one more token: another number if any token was another."""
    return (state * 48_271 + token + 11) % 2_147_483_647


def drawn_from(state: int) -> int:
    """The token after a text; every 8th is END."""
    return END if state // 64 % 8 == 0 else 1 + state % (VOCABULARY - 1)


def continued(prompt: Sequence[int], most: int) -> list[int]:
    """What a request writes when it is alone."""
    state, tokens = reduce(read, prompt, 1), []
    while len(tokens) < most and tokens[-1:] != [END]:
        tokens.append(drawn_from(state))
        state = read(state, tokens[-1])
    return tokens


@cache
def prompt_of(length: int, tokens: int, seed: int) -> tuple[int, ...]:
    """A prompt after which END is the token number `tokens`; 0: no END in the first twelve."""
    rng = random.Random(f"{length} {tokens} {seed}")
    while True:
        prompt = tuple(rng.randrange(1, VOCABULARY) for _ in range(length))
        text = continued(prompt, tokens or 12)
        if (END in text) == (tokens > 0) and len(text) == (tokens or 12):
            return prompt


# ---- what must happen -------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    """A request, and how far it is if everything goes as it should."""

    name: str
    prompt: tuple[int, ...]
    most: int
    words: list[int] = field(default_factory=list)  # all that it writes, alone
    rows: int = 0
    told: int = 0
    over: bool = False


class Ideal:
    """Who has a row in which step, and what each turn returns; tokens come from `continued`."""

    def __init__(self, num_blocks: int) -> None:
        self.free = num_blocks
        self.waiting: list[Request] = []
        self.flying: list[Request] = []

    def abort(self, name: str) -> None:
        """Return no later token of this request."""
        self.waiting = [request for request in self.waiting if request.name != name]
        for request in self.flying:
            request.over |= request.name == name

    def turn(self) -> tuple[int, int, dict[str, int]]:
        """How many are admitted, how many rows are launched, and the tokens of the step before."""
        new = self.waiting[: self.free]
        self.waiting, self.free = self.waiting[self.free :], self.free - len(new)
        before = self.flying
        self.flying = [r for r in before if not r.over and r.rows < r.most] + new
        for request in self.flying:
            request.rows += 1
        tokens = {}
        for request in before:
            if not request.over:
                tokens[request.name] = request.words[request.told]
                request.told += 1
                request.over = END in request.words[: request.told]
        self.free += sum(request not in self.flying for request in before)
        return len(new), len(self.flying), tokens


# ---- the device -------------------------------------------------------------------------------


class Device:
    """What a submission sees of the laboratory: three methods."""

    def __init__(self, lab: "Laboratory") -> None:
        self.load, self.launch, self.fetch = lab.load, lab.launch, lab.fetch


@dataclass
class Text:
    """What is in a block: whose text, and its tokens by position."""

    owner: Request
    tokens: dict[int, int]


class Laboratory:
    """A loop under test, a device that watches, and what each turn did."""

    def __init__(self, impl: Any, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ideal = Ideal(num_blocks)
        self.story = [f"{num_blocks} blocks"]
        self.known: list[Request] = []
        self.memory: dict[int, Text] = {}
        self.queue: list[list[tuple[Text, int, int, int]]] = []  # text, block, position, token
        self.last: list[tuple[Text, int, int, int]] = []  # the step that was launched last
        self.drawn: list[int] = []
        self.now = 0
        self.launched: dict[int, list[int]] = {}  # by turn: the rows of each step
        self.loads: dict[int, int] = {}
        self.bubbles: list[int] = []  # turns
        self.wanted: list[tuple[int, int, dict[str, int]]] = []
        self.heard: list[dict[str, int]] = []
        self.notes: list[tuple[str, str]] = []  # a kind, and a sentence
        self.loop = impl.Overlapped(Device(self), num_blocks)

    def load(self, block: int, tokens: Sequence[int]) -> None:
        """At once, whatever is in the queue."""
        accept([block, list(tokens)], "The arguments of load", self.case)
        self.need(type(block) is int, "block", f"load({block!r}, ...): a block is a number.")
        self.need(0 <= block < self.num_blocks, "block", f"load({block}, ...): no such block.")
        owner = [r for r in self.known if list(r.prompt[:-1]) == list(tokens)]
        message = f"load({block}, {list(tokens)}): no waiting request has this prompt"
        self.need(owner, "prompt", f"{message}.")
        old = self.memory.get(block)
        if old and any(text is old for step in self.queue for text, *_ in step):
            self.note(
                "early",
                f"block {block} was loaded for {owner[0].name!r} while a step was in the queue "
                f"that still writes a token of {old.owner.name!r} into it",
            )
        elif old and not old.owner.over and old.owner.told < old.owner.most:
            self.note(
                "shared", f"block {block} was loaded although {old.owner.name!r} still runs in it"
            )
        self.memory[block] = Text(owner[0], dict(enumerate(tokens)))
        self.loads[self.now] = self.loads.get(self.now, 0) + 1

    def launch(self, rows: Sequence[tuple[int, int, int]]) -> None:
        """Another step at the end of the queue."""
        step = accept([tuple(row) for row in rows], "The rows of a step", self.case)
        self.need(step, "empty", "A step without rows was launched.")
        self.need(len(self.queue) < 2, "full", "A third step was launched: two are in the queue.")
        message = f"launch({step}): a row is (block, position, token), three ints"
        self.need(all([type(n) for n in row] == [int] * 3 for row in step), "form", message)
        message = f"launch({step}): no two rows of a step have the same block"
        self.need(len({row[0] for row in step}) == len(step), "twice", message)
        before, self.last = self.last, []
        for block, position, token in step:
            self.need(block in self.memory, "loaded", f"Nothing was loaded into block {block}")
            self.need(position >= 0, "position", f"launch({step}): the position {position}")
            text = self.memory[block]
            if token < 0:
                message = (
                    f"launch({step}): the step before has {len(before)} rows, none for {token}"
                )
                self.need(-token <= len(before), "reference", message)
                other = before[-1 - token][0].owner
                if other is not text.owner:
                    name = text.owner.name
                    self.note(
                        "reference",
                        f"the row of {name!r} takes the token that {other.name!r} draws",
                    )
            self.last.append((text, block, position, token))
        if not self.queue and len(self.wanted) > 1 and self.wanted[-2][1]:
            self.bubbles.append(self.now)
        self.queue.append(self.last)
        self.launched.setdefault(self.now, []).append(len(step))

    def fetch(self) -> list[int]:
        """Now the oldest step has to run."""
        self.need(self.queue, "nothing", "fetch() was called, and no step is in the queue.")
        drawn = []
        for _, block, position, token in self.queue.pop(0):
            text = self.memory[block].tokens
            text[position] = token if token >= 0 else self.drawn[-1 - token]
            tokens = [text.get(at, UNWRITTEN) for at in range(position + 1)]
            drawn.append(drawn_from(reduce(read, tokens, 1)))
        self.drawn = drawn
        return list(drawn)

    def need(self, condition: object, kind: str, message: str) -> None:
        """What a device cannot do ends the check."""
        if not condition:
            expect(False, f"{message.rstrip('.')} ({self.case}).", ("device", kind))

    def note(self, kind: str, text: str) -> None:
        """What may explain wrong tokens later."""
        self.notes.append((kind, f"in turn {self.now}, {text}"))

    @property
    def case(self) -> str:
        """How to repeat it."""
        return f"{'; '.join(self.story)}; turn {self.now}"

    # ---- what is done to the loop --------------------------------------------------------

    def add(self, name: str, length: int, tokens: int, most: int = 12, seed: int = 0) -> None:
        """A prompt of `length` after which END is token number `tokens` (0: none comes)."""
        prompt = prompt_of(length, tokens, seed + 100 * len(self.known))
        request = Request(name, prompt, most, continued(prompt, most))
        self.known.append(request)
        self.ideal.waiting.append(request)
        ends = f"END is its token {tokens}" if 0 < tokens <= most else f"most={most}"
        self.story.append(f"after turn {self.now} add {name!r}, {length} tokens, {ends}")
        self.loop.add(name, list(prompt), most)

    def abort(self, name: str) -> None:
        """Its tokens are not wanted."""
        self.story.append(f"after turn {self.now} abort {name!r}")
        self.ideal.abort(name)
        self.loop.abort(name)

    def turns(self, count: int) -> None:
        """Several turns; what they return is looked at later."""
        for _ in range(count):
            self.now += 1
            self.wanted.append(self.ideal.turn())
            got = accept(self.loop.turn(), "The result of turn()", self.case)
            form = type(got) is dict and all(type(name) is str for name in got)
            message = f"The result of turn() ({self.case}): expected a dict of tokens by name"
            expect(form, f"{message}, got {got!r}.", "form")
            for token in got.values():
                number(token, "A token", self.case)
            self.heard.append(dict(got))

    def rest(self) -> None:
        """Turns until everything has ended, and three more."""
        self.turns(3)
        while self.ideal.waiting or self.ideal.flying or self.ideal.free < self.num_blocks:
            self.turns(1)
        self.turns(3)
        self.story.append("then turns until nothing is left")

    # ---- what is compared ----------------------------------------------------------------

    def tokens(self, *aborted: str) -> None:
        """Each name's tokens, whenever they came; of those who were aborted the first ones."""
        names = {request.name for request in self.known}
        strange = sorted({name for turn in self.heard for name in turn} - names)
        expect(not strange, f"Tokens came for {strange}, which was never added.", strange)
        why = f"; {self.notes[0][1]}" if self.notes else ""
        for name in sorted(names):
            got = [turn[name] for turn in self.heard if name in turn]
            words = [word for r in self.known if r.name == name for word in r.words]
            want = words[: len(got)] if name in aborted else words
            self.same(got, want, f"The tokens of {name!r}", self.case + why)

    def same(self, got: list[int], want: list[int], what: str, case: str) -> None:
        """Like `equal`; but what is noted of wrong tokens is from where on they are wrong, and why:
        their values depend on which of the free blocks was taken."""
        pairs = zip(got, want, strict=False)
        first = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(got), len(want)))
        kinds = sorted({kind for kind, _ in self.notes})
        wrong = [what, first, len(got) < len(want), kinds]
        message = f"{what} ({case}): expected {describe(want)}, got {describe(got)}."
        expect(got == want, message, True if got == want else wrong)

    def silent(self, name: str, since: int) -> None:
        """An aborted request is not heard of any more."""
        late = [at for at in range(since, len(self.heard)) if name in self.heard[at]]
        message = f"{name!r} was aborted after turn {since}, and turn {late and late[0] + 1}"
        expect(not late, f"{message} still returned a token of it ({self.case}).", late)

    def busy(self) -> None:
        """No launch found the device without work."""
        first = f"; the first in turn {self.bubbles[0]}" if self.bubbles else ""
        what = "Bubbles, launches that find the device without work"
        equal(len(self.bubbles), 0, what, self.case + first)

    def punctual(self) -> None:
        """Every turn returns the tokens of the step that the turn before launched."""
        for at, (_, _, want) in enumerate(self.wanted):
            equal(self.heard[at], want, f"What turn {at + 1} returns", self.case)

    def rows(self) -> None:
        """The rows of each turn's step: none too many, none too few."""
        got = [self.launched.get(at + 1, []) for at in range(self.now)]
        want = [[rows] if rows else [] for _, rows, _ in self.wanted]
        for at in range(self.now):
            equal(
                got[at], want[at], f"The rows of the steps that turn {at + 1} launches", self.case
            )

    def admitted(self) -> None:
        """How many blocks were loaded in each turn, neither too early nor too late."""
        got = [self.loads.get(at + 1, 0) for at in range(self.now)]
        for at, (want, _, _) in enumerate(self.wanted):
            early = got[at] > want and any(kind == "early" for kind, _ in self.notes)
            why = f"; {self.notes[0][1]}" if early else ""
            equal(got[at], want, f"Requests that turn {at + 1} admits", self.case + why)

    def everything(self) -> None:
        """All of it."""
        observe([kind for kind, _ in self.notes[:1]])
        self.busy()
        self.admitted()
        self.rows()
        self.punctual()
        left = len(self.queue)
        equal(left, 0, "Steps in the queue after three turns with nothing to do", self.case)


# ---- the checks -------------------------------------------------------------------------------


@check(1, "One request at a time: the right tokens")
def test_alone(impl: Any) -> None:
    """END as the first, second and fifth token; or as many as were asked for."""
    for length, tokens, most in (
        (2, 1, 12),
        (5, 2, 12),
        (3, 5, 12),
        (4, 0, 1),
        (2, 0, 2),
        (6, 0, 7),
    ):
        lab = Laboratory(impl, 1)
        lab.add("a", length, tokens, most)
        lab.rest()
        lab.tokens()


@check(1, "Requests that come and go, each in a new block: the right tokens")
def test_together(impl: Any) -> None:
    """Those before them in the step end, so rows move up; new ones come while a step is running."""
    lab = Laboratory(impl, 8)
    for name, tokens in (("a", 2), ("b", 6), ("c", 1), ("d", 0)):
        lab.add(name, 3, tokens, 9)
    lab.turns(2)
    lab.add("e", 4, 3)
    lab.turns(1)
    lab.add("f", 5, 0, 4)
    lab.add("g", 2, 2)
    lab.rest()
    lab.tokens()


@check(2, "A request that wrote END: its block, and its row in the queue")
def test_ended(impl: Any) -> None:
    """A long prompt waits for the block; the tokens tell whether it was left alone."""
    for blocks in (1, 2, 3):
        lab = Laboratory(impl, blocks)
        lab.add("a", 2, 3)
        lab.add("b", 2, 0, 9)
        for name, length in (("c", 12), ("d", 14), ("e", 13)):
            lab.add(name, length, 2)
        lab.rest()
        lab.tokens()


@check(2, "An aborted request: its tokens, its block, and its row in the queue")
def test_aborted(impl: Any) -> None:
    """While it runs, while it waits, and when it has ended already."""
    lab = Laboratory(impl, 2)
    lab.add("a", 2, 0)
    lab.add("b", 3, 0, 10)
    lab.add("c", 14, 4)
    lab.add("d", 13, 2)
    lab.turns(4)
    lab.abort("a")
    lab.abort("d")
    lab.abort("unknown")
    lab.rest()
    lab.silent("a", 4)
    lab.silent("d", 4)
    lab.tokens("a", "d")
    lab = Laboratory(impl, 1)
    lab.add("a", 2, 0, 2)
    lab.add("b", 12, 3)
    lab.turns(5)
    lab.abort("a")
    lab.rest()
    lab.tokens()
    lab = Laboratory(impl, 1)
    lab.add("a", 2, 0, 9)
    lab.turns(2)
    lab.abort("a")
    lab.turns(3)
    lab.add("b", 14, 2)
    lab.rest()
    lab.silent("a", 2)
    lab.tokens("a")


@check(1, "A name that is used again")
def test_names(impl: Any) -> None:
    """The first of this name has a row in the queue when the second comes."""
    lab = Laboratory(impl, 3)
    lab.add("a", 4, 0)
    lab.add("b", 4, 0, 8)
    lab.turns(3)
    lab.abort("a")
    first = [turn["a"] for turn in lab.heard if "a" in turn]
    lab.add("a", 5, 4)
    lab.rest()
    got = [turn["a"] for turn in lab.heard if "a" in turn]
    want = first + lab.known[2].words
    lab.same(got, want, "The tokens of both 'a', of which the first was aborted", lab.case)
    lab = Laboratory(impl, 3)
    lab.add("a", 4, 2)
    lab.add("b", 4, 0, 8)
    lab.turns(3)
    lab.add("a", 5, 3)
    lab.rest()
    lab.tokens()


@check(1, "No bubbles: the next step is in the queue before this one is fetched")
def test_bubbles(impl: Any) -> None:
    """One text."""
    lab = Laboratory(impl, 1)
    lab.add("a", 3, 0, 6)
    lab.rest()
    lab.busy()


@check(2, "No bubbles when requests come and go")
def test_bubbles_of_many(impl: Any) -> None:
    """Several that come and go; blocks that are waited for; aborted requests."""
    lab = Laboratory(impl, 2)
    lab.add("long", 2, 0, 12)
    for name, tokens in (("b", 2), ("c", 1), ("d", 3)):
        lab.add(name, 9, tokens)
    lab.turns(5)
    lab.add("e", 5, 2)
    lab.rest()
    lab.busy()
    lab = Laboratory(impl, 2)
    lab.add("a", 3, 0, 12)
    lab.add("b", 3, 0, 12)
    lab.turns(3)
    lab.abort("b")
    lab.turns(1)
    lab.add("c", 9, 2)
    lab.rest()
    lab.busy()


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two blocks: a ends with its 2nd token, b has five, c waits for a block and has two."""
    lab = Laboratory(impl, 2)
    lab.add("a", 4, 2)
    lab.add("b", 3, 0, 5)
    lab.add("c", 9, 0, 2)
    lab.turns(8)
    lab.everything()


@check(2, "Rows: no extra row for a known length, one for an END")
def test_rows(impl: Any) -> None:
    """Lengths of one, two and five; END; both at the same token; an abort; nothing left to do."""
    for tokens, most in ((0, 1), (0, 2), (0, 5), (1, 5), (3, 9), (3, 3), (1, 1)):
        lab = Laboratory(impl, 1)
        lab.add("a", 3, tokens, most)
        lab.rest()
        lab.rows()
    lab = Laboratory(impl, 2)
    lab.add("a", 3, 0, 9)
    lab.add("b", 3, 0, 3)
    lab.turns(2)
    lab.abort("a")
    lab.rest()
    lab.rows()


@check(2, "Blocks: given away when the last step of their request is fetched")
def test_blocks(impl: Any) -> None:
    """After a known length, after END and after an abort; who waited longest comes first."""
    for tokens, most in ((0, 3), (3, 9), (1, 4), (0, 1)):
        lab = Laboratory(impl, 1)
        for name in "abc":
            lab.add(name, 5, tokens, most)
        lab.rest()
        lab.admitted()
    lab = Laboratory(impl, 2)
    lab.add("a", 5, 0, 12)
    lab.add("b", 5, 2)
    for name in "cde":
        lab.add(name, 5, 0, 2)
    lab.turns(3)
    lab.abort("a")
    lab.rest()
    lab.admitted()
    lab.punctual()


@check(2, "A hundred random histories, turn by turn")
def test_everything(impl: Any) -> None:
    """Few blocks, texts of all lengths, names that come again, aborts at any time."""
    for seed in seeds(100):
        rng = random.Random(seed)
        lab = Laboratory(impl, rng.randint(1, 4))
        for _ in range(rng.randint(4, 14)):
            alive = {r.name for r in lab.ideal.waiting + lab.ideal.flying if not r.over}
            if len(lab.known) < 9 and rng.random() < 0.6:
                name = rng.choice([name for name in "abcdefghijkl" if name not in alive])
                tokens, most = rng.choice((0, 0, 1, 2, 3, 5)), rng.choice((1, 2, 4, 8, 12))
                lab.add(name, rng.choice((2, 3, 5, 9, 14)), tokens, most, seed % 50)
            if lab.known and rng.random() < 0.15:
                lab.abort(rng.choice([request.name for request in lab.known]))
            lab.turns(rng.randint(0, 2))
        lab.rest()
        lab.everything()
