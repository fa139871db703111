"""The public checks of e07.2: after every call each table is exactly as long as it should be."""

import random
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

SHOWN = 7  # calls that a message repeats


def seen(length: int, window: int) -> range:
    """The positions that the newest of `length` tokens sees."""
    return range(max(0, length - window), length)


def pattern(table: list[Any]) -> str:
    """A table in a picture: # is a block, - is None."""
    return " ".join("-" if entry is None else "#" for entry in table)


def most_held(size: int, window: int) -> int:
    """The most blocks that one sequence ever has."""
    return (window + size - 2) // size + 1


class Trial:
    """A manager under test, a memory in which is done what it says, and what must come of it."""

    def __init__(self, impl: Any, num_blocks: int, size: int, window: int) -> None:
        self.manager = impl.WindowManager(num_blocks, size, window)
        self.num_blocks, self.size, self.window = num_blocks, size, window
        self.memory: list[list[int]] = [[0] * size for _ in range(num_blocks)]
        self.texts: dict[str, list[int]] = {}
        self.tables: dict[str, list[Any]] = {}  # as the manager told them last
        self.calls: list[tuple[str, int]] = []  # the latest, and how often in a row
        self.case = ""  # how to repeat it: the manager and these calls
        self.newest = 0  # every token is a number of its own

    # ---- what must be ---------------------------------------------------------------------

    def holders(self, block: int) -> list[str]:
        """Who has the block in his table."""
        return [name for name, table in self.tables.items() if block in table]

    def num_free(self) -> int:
        """Blocks that are in no table."""
        held = {block for table in self.tables.values() for block in table} - {None}
        return self.num_blocks - len(held)

    def wanted(self, length: int) -> str:
        """The picture of the table of a text."""
        places = -(-length // self.size)
        inside = {position // self.size for position in seen(length, self.window)}
        return pattern([place if place in inside else None for place in range(places)])

    # ---- the calls ------------------------------------------------------------------------

    def allocate(self, name: str, count: int) -> None:
        """Begin a sequence; what its newest token sees is written into the memory."""
        self._begin(f"allocate({name!r}, {count})")
        self._room(lambda: self.manager.allocate(name, count))
        self.newest += count
        self.texts[name] = list(range(self.newest - count + 1, self.newest + 1))
        self._follow_tables(name)
        for position in seen(count, self.window):
            place, offset = divmod(position, self.size)
            self.memory[self.tables[name][place]][offset] = self.texts[name][position]
        self.look()

    def append(self, name: str, times: int = 1) -> None:
        """Write one more token where the manager says; several times over."""
        for _ in range(times):
            self._begin(f"append({name!r})")
            place, offset = divmod(len(self.texts[name]), self.size)
            what = "The result of the last call"
            got = accept(self._room(lambda: self.manager.append(name)), what, self.case)
            shape = type(got) in (tuple, list) and len(got) == 2
            said = ("a block", got[1]) if shape else got
            equal(said, ("a block", offset), f"{what}, (block, offset)", self.case)
            self.newest += 1
            self.texts[name].append(self.newest)
            self._follow_tables(name)
            block = number(got[0], f"The block of {what.lower()}", self.case)
            right = block == self.tables[name][place]
            where = f"entry {place} of table({name!r}), where the token is looked up"
            expect(right, f"append returned {got} ({self.case}); the block is not {where}.")
            others = " and ".join(n for n in self.holders(block) if n != name)
            mine = f"append returned {got} ({self.case}): block {block} is held by {others}, too."
            expect(not others, mine)
            self.memory[block][offset] = self.newest
            self.look()

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

    def _begin(self, call: str) -> None:
        """Note a call, for the messages."""
        if self.calls and self.calls[-1][0] == call:
            call, times = self.calls.pop()
            self.calls.append((call, times + 1))
        else:
            self.calls = [*self.calls[-SHOWN:], (call, 1)]
        parts = [name if times == 1 else f"{times} x {name}" for name, times in self.calls]
        shown = ", ".join(["...", *parts[1:]] if len(parts) > SHOWN else parts)
        self.case = f"WindowManager({self.num_blocks}, {self.size}, {self.window}): {shown}"

    # ---- looking --------------------------------------------------------------------------

    def look(self) -> None:
        """What every newest token sees can be read through its table; other blocks are free."""
        self._follow_tables()
        what = f"num_free(), with the tables {self.tables} and {self.num_blocks} blocks in all"
        equal(self.manager.num_free(), self.num_free(), what, self.case)
        for name, text in self.texts.items():
            positions = seen(len(text), self.window)
            places = [divmod(position, self.size) for position in positions]
            read = [self.memory[self.tables[name][place]][offset] for place, offset in places]
            expect(
                read == text[positions.start :],
                f"What the newest token of {name!r} sees through its table {self.tables[name]} "
                f"({self.case}): expected {text[positions.start :]}, got {read}. A wrong write has "
                f"changed its blocks, or the table has moved.",
                (name, [a == b for a, b in zip(read, text[positions.start :], strict=True)]),
            )

    def _follow_tables(self, growing: str = "") -> None:
        """Ask for every table: None where it must be, no block twice, and nothing new but in the
        one that is `growing`."""
        for name, text in self.texts.items():
            what = f"table({name!r})"
            table = accept(self.manager.table(name), what, self.case)
            expect(type(table) is list, f"{what}: expected a list, got {type(table).__name__}.")
            picture = f"{what} of {len(text)} tokens (# is a block, - is None)"
            equal(pattern(table), self.wanted(len(text)), picture, self.case)
            blocks = [block for block in table if block is not None]
            for block in blocks:
                inside = 0 <= number(block, f"A block in {what}", self.case) < self.num_blocks
                expect(inside, f"{what} is {table} ({self.case}): there is no block {block}.")
            twice = len(set(blocks)) < len(blocks)
            expect(not twice, f"{what} is {table} ({self.case}): a block stands in it twice.")
            known = self.tables.get(name, table)
            same = [now in (None, then) for then, now in zip(known, table, strict=False)]
            kept = all(same) if name == growing else table == known
            expect(kept, f"{what} was {known} and is {table} after the last call ({self.case}).")
            self.tables[name] = list(table)  # not theirs, if it is no list of its own

    def _room(self, call: Any) -> Any:
        """Do a call for which there is room; an empty free list gets the sentence it deserves."""
        free = self.num_free()
        try:
            return call()
        except (IndexError, KeyError, ValueError) as error:
            if "empty" not in str(error):
                raise
            expect(
                False,
                f"The last call raised {type(error).__name__}: {error} ({self.case}). Before it, "
                f"{free} blocks were free. That is enough, if it first lets go of what the new "
                f"token does not see, and takes no block for an entry that is None.",
                "no block",
            )


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """A window of three tokens in blocks of two: two blocks are enough."""
    trial = Trial(impl, 4, 2, 3)
    trial.allocate("a", 3)
    trial.append("a", 4)


@check(2, "The length at which each entry becomes None")
def test_lengths(impl: Any) -> None:
    """Windows of some blocks, and of some blocks and a bit; of less than a block, and of one."""
    for size, window in ((2, 3), (4, 8), (4, 9), (4, 6), (3, 2), (4, 1), (1, 3)):
        manager = impl.WindowManager(100, size, window)
        gone: dict[int, int] = {}
        manager.allocate("a", 1)
        case = f"WindowManager(100, {size}, {window}), allocate('a', 1), then append('a') again"
        longest = 2 * window + 3 * size
        for length in range(2, longest + 1):
            manager.append("a")
            table = accept(manager.table("a"), "table('a')", case)
            expect(type(table) is list, f"table('a'): expected a list, got {describe(table)}.")
            observe(number(manager.num_free(), "num_free()", case))
            for place, entry in enumerate(table):
                if entry is None:
                    gone.setdefault(place, length)
        want = {place: (place + 1) * size + window for place in range((longest - window) // size)}
        what = f"Entry: the length at which it becomes None, up to a length of {longest}"
        equal(gone, want, what, case)


@check(1, "A text shorter than the window")
def test_short(impl: Any) -> None:
    """Nothing is given back, at no step."""
    trial = Trial(impl, 4, 4, 16)
    trial.allocate("a", 1)
    trial.append("a", 15)


@check(1, "A text of any length: tables, free blocks and tokens")
def test_steps(impl: Any) -> None:
    """The same windows, with everything looked at after every step."""
    for size, window in ((4, 8), (4, 7), (4, 9), (4, 6), (3, 2), (4, 1), (1, 3), (1, 1)):
        trial = Trial(impl, 20, size, window)
        trial.allocate("a", 1)
        trial.append("a", 2 * window + 2 * size)


@check(2, "Prompts longer than the window")
def test_prompts(impl: Any) -> None:
    """All lengths from one block to some windows, then they grow."""
    for size, window in ((4, 8), (4, 5), (3, 7), (2, 1)):
        for count in range(1, 2 * window + 2 * size):
            trial = Trial(impl, 20, size, window)
            trial.allocate("a", count)
            trial.append("a", size + 1)


@check(2, "Pools with no block to spare")
def test_tight(impl: Any) -> None:
    """As many blocks as the window ever touches, also for a prompt that is much longer."""
    for size, window in ((4, 8), (4, 6), (2, 3), (1, 4), (3, 1)):
        trial = Trial(impl, most_held(size, window), size, window)
        trial.allocate("a", 1)
        trial.append("a", 2 * window + 2 * size)
        trial.free("a")
        trial.allocate("a", 5 * window + 1)
        trial.append("a", 2 * size)


@check(2, "Forks: a block becomes free when the last window has left it")
def test_forks(impl: Any) -> None:
    """One goes ahead, then the other follows; and both in turn; also with entries of None."""
    for start in (4, 8, 16):
        for steps in ((7, 9), (12, 3), (1, 8)):
            trial = Trial(impl, 12, 4, 6)
            trial.allocate("a", start)
            trial.fork("a", "b")
            trial.append("b", steps[0])
            trial.append("a", steps[1])
    trial = Trial(impl, 12, 2, 4)
    trial.allocate("a", 6)
    trial.fork("a", "b")
    trial.fork("b", "c")
    for name in "abcabcabcccbbbaaa":
        trial.append(name)


@check(2, "The end of a sequence")
def test_ends(impl: Any) -> None:
    """First blocks that are gone are not given back again; shared ones stay for the other."""
    trial = Trial(impl, 3, 2, 3)
    trial.allocate("a", 9)
    trial.free("a")
    trial.allocate("a", 5)
    trial.append("a", 2)
    trial.free("a")
    for first, second in ("ab", "ba"):
        trial = Trial(impl, 8, 2, 5)
        trial.allocate("a", 8)
        trial.fork("a", "b")
        trial.append("b", 2)
        trial.free(first)
        trial.append(second, 5)
        trial.free(second)


@check(3, "Twenty random managers")
def test_everything(impl: Any) -> None:
    """Windows and blocks of every size, in pools that are just large enough for six sequences."""
    for seed in seeds(20):
        draw = random.Random(seed)
        size, window = draw.randint(1, 4), draw.randint(1, 9)
        trial = Trial(impl, 6 * most_held(size, window), size, window)
        for _ in range(40):
            one_call(trial, draw)


def one_call(trial: Trial, draw: random.Random) -> None:
    """A random call that makes sense."""
    live = sorted(trial.texts)
    unused = [name for name in "abcdef" if name not in live]
    full = [name for name in live if len(trial.texts[name]) % trial.size == 0]
    kind = draw.choices(("append", "allocate", "fork", "free"), (9, 2, 3, 1))[0]
    if unused and (not live or kind == "allocate"):
        trial.allocate(unused[0], draw.randint(1, 2 * trial.window + trial.size))
    elif full and unused and kind == "fork":
        trial.fork(draw.choice(full), unused[0])
    elif kind == "free":
        trial.free(draw.choice(live))
    else:
        trial.append(draw.choice(live))
