"""The public checks of e09.2: a tree of blocks beside one that looks at all of it each time."""

import random
from dataclasses import dataclass
from typing import Any

from minillm_exercises.checking import check, equal, seeds


@dataclass
class Known:
    """A block as it must be."""

    parent: int | None
    used: int
    pins: int = 0


class Told:
    """A tree under test, what it was told, and what must be in it."""

    def __init__(self, impl: Any) -> None:
        self.tree = impl.BlockTree()
        self.blocks: dict[int, Known] = {}
        self.story: list[str] = []

    def add(self, *blocks: tuple[int, int | None, int]) -> None:
        """Add blocks: number, parent, time."""
        for block, parent, now in blocks:
            self.blocks[block] = Known(parent, now)
            self.mark(block, now, 0)
            self.story.append(f"add({block}, {parent}, {now})")
            self.tree.add(block, parent, now)

    def start(self, block: int, now: int) -> None:
        """A request begins."""
        self.mark(block, now, 1)
        self.story.append(f"start({block}, {now})")
        self.tree.start(block, now)

    def finish(self, block: int) -> None:
        """A request ends."""
        self.mark(block, None, -1)
        self.story.append(f"finish({block})")
        self.tree.finish(block)

    def hit(self, block: int, now: int) -> None:
        """A request begins and ends at once."""
        self.start(block, now)
        self.finish(block)

    def evict(self, what: str, count: int) -> None:
        """Ask for `count` blocks, and compare."""
        want = self.next_out(count)
        self.story.append(f"evict({count})")
        equal(self.tree.evict(count), want, what, ", ".join(self.story))
        for block in want:
            del self.blocks[block]

    def mark(self, block: int | None, now: int | None, pins: int) -> None:
        """Use and pin a block and all above it."""
        while block is not None:
            known = self.blocks[block]
            known.used = known.used if now is None else now
            known.pins += pins
            block = known.parent

    def next_out(self, count: int) -> list[int]:
        """Which blocks must go: of all leaves each time the first."""
        left, out = dict(self.blocks), []
        while len(out) < count:
            parents = {known.parent for known in left.values()}
            leaves = [
                (known.used, block)
                for block, known in left.items()
                if block not in parents and known.pins == 0
            ]
            if not leaves:
                return []
            out.append(min(leaves)[1])
            del left[out[-1]]
        return out

    def room(self) -> int:
        """How many blocks can be evicted."""
        return max(n for n in range(len(self.blocks) + 1) if n == 0 or self.next_out(n))


def example(impl: Any) -> Any:
    """The README's tree."""
    tree = impl.BlockTree()
    for block, parent, now in ((1, None, 1), (4, 1, 2), (7, 1, 3), (2, None, 4), (5, 2, 5)):
        tree.add(block, parent, now)
    return tree


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Without a request that runs."""
    equal(example(impl).evict(3), [4, 7, 1], "The worked example", "evict(3)")


@check(1, "The worked example, with a running request")
def test_by_hand_pinned(impl: Any) -> None:
    """Blocks 4 and 1 are pinned."""
    tree = example(impl)
    tree.start(4, 6)
    equal(tree.evict(4), [], "The worked example", "start(4, 6), evict(4)")
    equal(tree.evict(3), [7, 5, 2], "The worked example", "start(4, 6), evict(4), evict(3)")


@check(2, "Blocks without children: the order of their last use")
def test_order(impl: Any) -> None:
    """Oldest use first; a request that starts is a use, and one that ends is none."""
    told = Told(impl)
    told.add((3, None, 1), (1, None, 2), (9, None, 3), (2, None, 4))
    told.evict("Four texts of one block, used one after the other", 1)
    told.hit(1, 5)
    told.evict("Block 1 was used again", 2)
    told = Told(impl)
    told.add((7, None, 6), (4, None, 8), (5, None, 9))
    told.start(7, 10)
    told.hit(4, 11)
    told.finish(7)
    told.evict("Block 7 was used at 10 and finished later", 3)


@check(1, "Equal times")
def test_ties(impl: Any) -> None:
    """The smaller number first, in whatever order they were added, and among new leaves too."""
    told = Told(impl)
    told.add((8, None, 1), (3, None, 1), (5, None, 1), (4, None, 1), (10, None, 1))
    told.evict("Five blocks with one time", 2)
    told.add((2, 5, 1), (9, 5, 1), (6, 10, 1))
    told.evict("Leaves and parents with one time", 6)


@check(2, "Parents become leaves")
def test_parents(impl: Any) -> None:
    """A chain from its end; a parent after its last child; and not before an older leaf."""
    told = Told(impl)
    told.add((1, None, 1), (2, 1, 2), (3, 2, 3))
    told.evict("A chain, its end", 1)
    told.evict("A chain, the rest", 2)
    told = Told(impl)
    told.add((4, None, 4), (5, 4, 5), (6, 4, 6), (7, None, 7), (8, 4, 8))
    told.evict("A parent of three, used with the last of them", 3)
    told.add((9, None, 9))
    told.evict("A parent with one child left, and another leaf", 3)
    told = Told(impl)
    told.add((1, None, 1), (2, 1, 2), (3, None, 3), (4, 3, 4))
    told.hit(1, 5)
    told.evict("Block 1 was used once more without its child", 3)
    told.evict("Block 1 is left", 1)


@check(2, "A use of a block uses all blocks above it: start")
def test_start_uses(impl: Any) -> None:
    """With equal times, and with a leaf that was pinned while its turn came."""
    told = Told(impl)
    told.add((9, None, 1), (8, 9, 2), (1, 8, 3))
    told.hit(1, 4)
    told.add((5, None, 4), (6, None, 4))
    told.evict("Block 1 was used together with 8 and 9, and at the same time as 5 and 6", 5)
    told = Told(impl)
    told.add((3, None, 1), (4, 3, 2), (2, None, 3))
    told.start(2, 4)
    told.hit(4, 5)
    told.evict("Block 2 is pinned", 1)
    told.finish(2)
    told.evict("Block 2 was used before 3, which was used with 4", 1)


@check(2, "A use of a block uses all blocks above it: add")
def test_add_uses(impl: Any) -> None:
    """With equal times, and with a leaf that was pinned while its turn came."""
    told = Told(impl)
    told.add((9, None, 1), (8, 9, 2), (1, 8, 3), (5, None, 3), (6, None, 3))
    told.evict("Block 1 was added together with uses of 8 and 9, as early as 5 and 6", 5)
    told = Told(impl)
    told.add((3, None, 1), (2, None, 2))
    told.start(2, 3)
    told.add((4, 3, 4))
    told.evict("Block 2 is pinned", 1)
    told.finish(2)
    told.evict("Block 2 was used before 3, which was used when 4 was added", 1)


@check(2, "Pins: one running request")
def test_pins(impl: Any) -> None:
    """Not the block, not those above it; those below it may go; and all when it has ended."""
    told = Told(impl)
    told.add((1, None, 1), (2, 1, 2), (3, 2, 3), (4, None, 4), (5, 4, 5))
    told.start(2, 6)
    told.evict("A request runs with 2 and 1, and 3 is below", 3)
    told.evict("Only pinned blocks are left", 1)
    told.add((6, 2, 7))
    told.evict("A block added below a pinned one, which has no pin of its own", 1)
    told.finish(2)
    told.evict("The request has ended", 2)
    told = Told(impl)
    told.add((1, None, 1), (2, 1, 2))
    told.start(1, 3)
    told.add((3, None, 4), (4, None, 5))
    told.evict("Block 1 is pinned, block 2 below it is not", 2)


@check(2, "Pins: several running requests")
def test_shared_pins(impl: Any) -> None:
    """Each has a finish of its own."""
    told = Told(impl)
    told.add((1, None, 1), (2, 1, 2), (3, 1, 3), (4, None, 4))
    told.start(2, 5)
    told.start(2, 6)
    told.start(3, 7)
    told.finish(2)
    told.evict("Block 2 has had two requests, one of which has ended", 1)
    told.evict("Blocks 1, 2 and 3 are pinned", 1)
    told.finish(2)
    told.evict("Both requests of block 2 have ended, the one of block 3 has not", 1)
    told.evict("Block 3 and its parent are pinned", 1)
    told.finish(3)
    told.evict("No request runs any more", 2)


@check(2, "Counts: none, all possible blocks, and one more")
def test_counts(impl: Any) -> None:
    """More than the leaves is possible, more than all is not, and then nothing is lost."""
    told = Told(impl)
    told.evict("An empty tree", 1)
    told.add((1, None, 1), (2, 1, 2), (3, 2, 3), (4, 2, 4))
    told.evict("None", 0)
    told.evict("Five of four blocks", 5)
    told.evict("One after a refusal", 1)
    told.evict("Four of three blocks", 4)
    told.evict("Three of three blocks, of which one is a leaf", 3)
    told.evict("One of no blocks", 1)


@check(1, "The number of an evicted block is used again")
def test_numbers(impl: Any) -> None:
    """Another place, another parent, another time; no pins and no children."""
    told = Told(impl)
    told.add((1, None, 1), (2, 1, 2), (3, 1, 3))
    told.hit(3, 4)
    told.evict("The first text", 3)
    told.add((2, None, 5), (3, None, 6), (1, 3, 7))
    told.hit(2, 8)
    told.evict("Block 3 is above block 1 now, and 2 stands alone", 2)
    told.add((1, 2, 9))
    told.start(1, 10)
    told.add((3, 1, 11))
    told.evict("Block 3 is below 1 and 2, which are pinned", 2)
    told.evict("Block 3 may go", 1)


@check(2, "A hundred random histories")
def test_everything(impl: Any) -> None:
    """Few numbers, so that they come again; a clock that often stands still; then all that can."""
    for seed in seeds(100):
        draw = random.Random(seed)
        told, running, now = Told(impl), [], 0
        for _ in range(draw.randint(5, 30)):
            now += draw.random() < 0.3
            known, what = sorted(told.blocks), draw.random()
            if what < 0.4 or not known:
                new = draw.choice([block for block in range(40) if block not in known])
                told.add((new, draw.choice([None, *known, *known]), now))
            elif what < 0.6:
                running.append(draw.choice(known))
                told.start(running[-1], now)
            elif what < 0.8 and running:
                told.finish(running.pop(draw.randrange(len(running))))
            else:
                told.evict("A random history", draw.randint(0, 4))
        told.evict("A random history, one more than can go", told.room() + 1)
        told.evict("A random history, all that can go", told.room())
