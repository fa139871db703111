"""The public checks of e07.1: every call is done for real, in a memory that holds tokens."""

import random
from collections.abc import Callable
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, number, seeds

SHOWN = 7  # calls that a message repeats
REFUSED = " after a refusal, which changes nothing"


class Trial:
    """A manager under test, a memory in which is done what it says, and what must come of it."""

    def __init__(self, impl: Any, num_blocks: int, size: int) -> None:
        self.manager = impl.BlockManager(num_blocks, size)
        self.num_blocks, self.size = num_blocks, size
        self.memory: list[list[int]] = [[0] * size for _ in range(num_blocks)]
        self.texts: dict[str, list[int]] = {}
        self.tables: dict[str, list[int]] = {}  # as the manager told them last
        self.calls: list[tuple[str, int]] = []  # the latest, and how often in a row
        self.case = ""  # how to repeat it: the manager and these calls
        self.newest = 0  # every token is a number of its own

    # ---- what must be ---------------------------------------------------------------------

    def holders(self, block: int) -> list[str]:
        """Who has the block in his table."""
        return [name for name, table in self.tables.items() if block in table]

    def num_free(self) -> int:
        """Blocks that are in no table."""
        return self.num_blocks - len({b for table in self.tables.values() for b in table})

    def blocks(self, name: str) -> int:
        """How many blocks hold the text of a sequence."""
        return -(-len(self.texts[name]) // self.size)

    def tokens(self, count: int) -> list[int]:
        """The next tokens of a text."""
        self.newest += count
        return list(range(self.newest - count + 1, self.newest + 1))

    # ---- the calls ------------------------------------------------------------------------

    def allocate(self, name: str, count: int) -> bool:
        """Begin a sequence, if there is room."""
        self._begin(f"allocate({name!r}, {count})")
        fits = -(-count // self.size) <= self.num_free()
        got = self.manager.allocate(name, count)
        what = f"The result of the last call; free blocks: {self.num_free()}"
        equal(got, fits, what, self.case)
        if fits:
            self.texts[name] = self.tokens(count)
            self._follow_tables(name)
            for position, token in enumerate(self.texts[name]):
                place, offset = divmod(position, self.size)
                self.memory[self.tables[name][place]][offset] = token
        self.look("" if fits else REFUSED)
        return fits

    def append(self, name: str) -> bool:
        """Write one more token where the manager says."""
        self._begin(f"append({name!r})")
        length, table = len(self.texts[name]), self.tables[name]
        offset = length % self.size
        sharers = [n for n in self.holders(table[-1]) if n != name] if table and offset else []
        room = not (offset == 0 or sharers) or self.num_free() > 0
        got = accept(self.manager.append(name), "The result of the last call", self.case)
        if not room:
            why = "a copy" if offset else "a new block"
            again = ", as in the call before" if self.calls[-1][1] > 1 else ""
            what = f"append needs {why} and no block is free{again}; its result"
            equal(got, None, what, self.case)
            self.look(REFUSED)
            return False
        source = "its last block" if sharers else None
        where = "its last block" if offset and not sharers else "a free block"
        shape = type(got) in (tuple, list) and len(got) == 3
        said = (self._kind(name, got[0]), got[1], self._kind(name, got[2])) if shape else got
        before = f"{name!r} had {length} tokens, its last block was {self._held(name, sharers)}"
        what = f"(block, offset, source) of the last call; {before}"
        equal(said, (where, offset, source), what, self.case)
        self._write(got, self.tokens(1)[0])
        self.texts[name].append(self.newest)
        self._follow_tables(name)
        self.look()
        return True

    def fork(self, parent: str, child: str) -> None:
        """A second sequence with the same text."""
        self._begin(f"fork({parent!r}, {child!r})")
        self.manager.fork(parent, child)
        self.texts[child] = list(self.texts[parent])
        self.look()

    def free(self, name: str) -> None:
        """End a sequence."""
        self._begin(f"free({name!r})")
        self.manager.free(name)
        del self.texts[name], self.tables[name]
        self.look()

    def refuses(self, method: str, *arguments: object) -> None:
        """A call that makes no sense: ValueError, and nothing has changed."""
        call: Callable[..., object] = getattr(self.manager, method)
        self._begin(f"{method}({', '.join(map(repr, arguments))})")
        raised = "no error"
        try:
            call(*arguments)
        except NotImplementedError:
            raise
        except Exception as error:
            raised = type(error).__name__
        equal(raised, "ValueError", "What the last call raises", self.case)
        self.look(REFUSED)

    def _begin(self, call: str) -> None:
        """Note a call, for the messages."""
        if self.calls and self.calls[-1][0] == call:
            call, times = self.calls.pop()
            self.calls.append((call, times + 1))
        else:
            self.calls = [*self.calls[-SHOWN:], (call, 1)]
        parts = [name if times == 1 else f"{times} x {name}" for name, times in self.calls]
        shown = ", ".join(["...", *parts[1:]] if len(parts) > SHOWN else parts)
        self.case = f"BlockManager({self.num_blocks}, {self.size}): {shown}"

    # ---- looking --------------------------------------------------------------------------

    def look(self, when: str = "") -> None:
        """Every text can be read through its table, and every other block is free."""
        self._follow_tables()
        for name, text in self.texts.items():
            places = [divmod(position, self.size) for position in range(len(text))]
            read = [self.memory[self.tables[name][place]][offset] for place, offset in places]
            wrong = [position for position, token in enumerate(text) if read[position] != token]
            expect(
                not wrong,
                f"The text of {name!r}, read through its table {self.tables[name]} "
                f"({self.case}): expected {text}, got {read}. A wrong write has changed its "
                f"blocks, or it holds others than were written.",
                (name, wrong),
            )
        what = (
            f"num_free(){when}, with the tables {self.tables} and {self.num_blocks} blocks in all"
        )
        equal(self.manager.num_free(), self.num_free(), what, self.case)

    def _follow_tables(self, growing: str = "") -> None:
        """Ask for every table: as many blocks as the text needs, no block twice, and nothing new
        but in the one that is `growing`."""
        for name in self.texts:
            what = f"table({name!r})"
            table = accept(self.manager.table(name), what, self.case)
            expect(type(table) is list, f"{what}: expected a list, got {type(table).__name__}.")
            needs = f"The number of blocks in {what}, for {len(self.texts[name])} tokens"
            equal(len(table), self.blocks(name), needs, self.case)
            for block in table:
                inside = 0 <= number(block, f"A block in {what}", self.case) < self.num_blocks
                expect(inside, f"{what} is {table} ({self.case}): there is no block {block}.")
            twice = len(set(table)) < len(table)
            expect(not twice, f"{what} is {table} ({self.case}): a block stands in it twice.")
            known = self.tables.get(name, table)
            expect(
                table == known or name == growing,
                f"{what} was {known} and is {table} after the last call ({self.case}), which "
                f"was not about {name!r}: does it share its list with another table?",
            )
            self.tables[name] = list(table)  # not theirs, if it is no list of its own

    def _kind(self, name: str, block: object) -> object:
        """A block in words that do not depend on its number: that one is free to choose."""
        if block is None:
            return None
        table = self.tables[name]
        if type(block) is not int or not 0 <= block < self.num_blocks:
            return f"{block!r}, which is no block"
        if table and block == table[-1]:
            return "its last block"
        holders = " and ".join(self.holders(block))
        return f"a block that {holders} holds" if holders else "a free block"

    def _held(self, name: str, sharers: list[str]) -> str:
        if len(self.texts[name]) % self.size == 0:
            return "full (or there is none)"
        return f"held by {' and '.join(sharers)}, too" if sharers else "partly filled and its own"

    def _write(self, got: Any, token: int) -> None:
        block, offset, source = got
        if source is not None:
            self.memory[block] = list(self.memory[source])
        self.memory[block][offset] = token


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """A prompt of six tokens, a fork in the middle of a block, and both grow."""
    trial = Trial(impl, 5, 4)
    trial.allocate("a", 6)
    trial.fork("a", "b")
    for name in "baaa":
        trial.append(name)
    trial.free("a")


@check(1, "Prompts: just enough blocks")
def test_prompts(impl: Any) -> None:
    """Nothing, one token, a block less one, exactly, and one more; a pool that is just full."""
    for size in (1, 4):
        for count in (0, 1, size - 1, size, size + 1, 3 * size):
            Trial(impl, 4, size).allocate("a", count)
    trial = Trial(impl, 4, 3)
    trial.allocate("a", 7)
    trial.allocate("b", 3)


@check(1, "Growing over the border of a block")
def test_grow(impl: Any) -> None:
    """From an empty prompt, a partly filled and a full block; blocks of a single token."""
    for size, start in ((4, 0), (4, 2), (4, 4), (1, 0)):
        trial = Trial(impl, 4, size)
        trial.allocate("a", start)
        for _ in range(2 * size if size > 1 else 4):
            trial.append("a")


@check(2, "A fork in the middle of a block: every writer copies, except the last holder")
def test_fork(impl: Any) -> None:
    """The child first, the parent first, three holders, and a fork of a fork."""
    for order in ("baab", "abba"):
        trial = Trial(impl, 6, 4)
        trial.allocate("a", 5)
        trial.fork("a", "b")
        for name in order:
            trial.append(name)
    trial = Trial(impl, 8, 3)
    trial.allocate("a", 4)
    trial.fork("a", "b")
    trial.fork("b", "c")
    for name in "cabbca":
        trial.append(name)


@check(1, "A fork at the end of a block: full blocks are never copied")
def test_border(impl: Any) -> None:
    """Both go on in new blocks; a fork of an empty sequence shares nothing."""
    for count in (4, 8, 0):
        trial = Trial(impl, 6, 4)
        trial.allocate("a", count)
        trial.fork("a", "b")
        for name in "baab":
            trial.append(name)


@check(2, "The blocks that become free when a sequence ends")
def test_free(impl: Any) -> None:
    """The parent first, the child first; who is left alone writes without a copy."""
    for first, second in ("ab", "ba"):
        trial = Trial(impl, 4, 4)
        trial.allocate("a", 6)
        trial.fork("a", "b")
        trial.free(first)
        trial.append(second)
        trial.free(second)
        trial.allocate("c", 16)
    trial = Trial(impl, 6, 2)
    trial.allocate("a", 3)
    trial.fork("a", "b")
    trial.fork("a", "c")
    trial.append("b")
    for name in "cba":
        trial.free(name)


@check(2, "A refusal changes nothing")
def test_refusals(impl: Any) -> None:
    """A prompt that does not fit; a new block and a copy when none is free; then there is one."""
    trial = Trial(impl, 3, 2)
    trial.allocate("a", 2)
    trial.allocate("b", 5)
    trial.allocate("b", 4)
    trial.append("a")
    trial.append("a")
    trial.free("b")
    trial.append("a")
    trial = Trial(impl, 3, 3)
    trial.allocate("a", 4)
    trial.fork("a", "b")
    trial.allocate("c", 3)
    for name in "aba":
        trial.append(name)
    trial.free("c")
    for name in "baab":
        trial.append(name)


@check(1, "Names that are in use, and names that are not")
def test_names(impl: Any) -> None:
    """ValueError, and no block is lost; a name may be used again after its end."""
    trial = Trial(impl, 6, 2)
    trial.allocate("a", 3)
    trial.refuses("allocate", "a", 2)
    trial.fork("a", "b")
    trial.refuses("fork", "a", "b")
    trial.refuses("fork", "a", "a")
    trial.refuses("fork", "c", "d")
    trial.refuses("append", "c")
    trial.refuses("free", "c")
    trial.free("a")
    trial.refuses("free", "a")
    trial.refuses("append", "a")
    trial.allocate("a", 4)


@check(3, "A thousand random operations")
def test_everything(impl: Any) -> None:
    """Small pools, so that they are often full."""
    for seed in seeds(25):
        draw = random.Random(seed)
        trial = Trial(impl, draw.randint(2, 9), draw.randint(1, 4))
        for _ in range(40):
            one_call(trial, draw)


def one_call(trial: Trial, draw: random.Random) -> None:
    """A random call that makes sense."""
    live, names = sorted(trial.texts), "abcdef"
    unused = [name for name in names if name not in live]
    kind = draw.choices(("append", "allocate", "fork", "free"), (10, 2, 2, 1))[0]
    if unused and (not live or kind == "allocate"):
        trial.allocate(unused[0], draw.randint(0, 3 * trial.size))
    elif live and unused and kind == "fork":
        trial.fork(draw.choice(live), unused[0])
    elif live and kind == "free":
        trial.free(draw.choice(live))
    elif live:
        trial.append(draw.choice(live))
