"""The public checks of e17.1: positions, masks, windows, paths."""

import random
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds

EXAMPLE = [-1, -1, 0, 0, 1]
CHAIN = [-1, 0, 1, 2]
STAR = [-1] * 4
SHAPES = ([], [-1], CHAIN, STAR, EXAMPLE, [-1, 0, -1, 2, 1, 3, 0, -1])


def path_of(parents: list[int], node: int) -> list[int]:
    """The nodes from the root to a node, by climbing."""
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0] - 1] + 1)
    return path


def random_tree(draw: random.Random, most: int = 63) -> list[int]:
    """Deep and flat ones."""
    reach = draw.choice((1, 2, 4, 64))
    return [draw.randrange(max(-1, i - 1 - reach), i) for i in range(draw.randint(1, most))]


def called(impl: Any, name: str, parents: list[int], *rest: Any) -> list[Any]:
    """What a function returns, as a list; the parents are as they were."""
    given = list(parents)
    case = f"{name}({', '.join(map(repr, (parents, *rest)))})"[:300]
    got = accept(getattr(impl, name)(given, *rest), f"{name} returns a list", case)
    expect(isinstance(got, list | tuple), f"{name} returns a list; it returned {got!r:.200}.")
    equal(given, list(parents), f"{name} may not change the parents", case)
    return list(got)


def check_positions(impl: Any, parents: list[int], start: int) -> None:
    want = [start + len(path_of(parents, node)) - 1 for node in range(len(parents) + 1)]
    equal(called(impl, "positions", parents, start), want, "The positions",
          f"positions({parents}, {start})"[:300])  # fmt: skip


def check_masks(impl: Any, parents: list[int]) -> None:
    """The masks as sets of nodes."""
    got = called(impl, "masks", parents)
    case = f"masks({parents})"[:300]
    equal(len(got), len(parents) + 1, "The number of masks", case)
    for node, mask in enumerate(got):
        whole = type(mask) is int
        expect(whole, f"A mask is a whole number (int); one is {mask!r}. ({case})", repr(mask))
        seen = [each for each in range(mask.bit_length()) if mask >> each & 1] if mask > 0 else []
        equal(seen, path_of(parents, node), f"The nodes in the mask of node {node}", case)


def check_visible(impl: Any, parents: list[int], start: int, window: int | None) -> None:
    """Each row as the list of slots that are seen."""
    got = called(impl, "visible", parents, start, window)
    case = f"visible({parents}, {start}, {window})"[:300]
    count = len(parents) + 1
    equal(len(got), count, "The number of rows", case)
    for node, row in enumerate(got):
        row = accept(row, f"The row of node {node}", case)
        expect(isinstance(row, list | tuple), f"A row is a list; one is {row!r:.100}. ({case})")
        equal(len(row), start + count, f"The number of slots in the row of node {node}", case)
        kinds = {type(each).__name__ for each in row}
        expect(kinds <= {"bool"}, f"Entries are True or False, not {', '.join(sorted(kinds))}. "
               f"({case})", sorted(kinds))  # fmt: skip
        path = path_of(parents, node)
        first = 0 if window is None else start + len(path) - window
        want = list(range(max(first, 0), start))
        want += [start + each for depth, each in enumerate(path) if start + depth >= first]
        seen = [slot for slot, each in enumerate(row) if each]
        equal(seen, want, f"The slots that node {node} sees", case)


def check_leaves(impl: Any, parents: list[int]) -> None:
    inner = {parent + 1 for parent in parents}
    ends = [node for node in range(len(parents) + 1) if node not in inner]
    want = [path_of(parents, node) for node in ends]
    equal(called(impl, "leaves", parents), want, "The paths", f"leaves({parents})"[:300])


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """All four functions."""
    equal(called(impl, "positions", EXAMPLE, 5), [5, 6, 6, 7, 7, 7], "The positions", "the example")
    masks = [0b000001, 0b000011, 0b000101, 0b001011, 0b010011, 0b100101]
    equal(called(impl, "masks", EXAMPLE), masks, "The masks", "the example")
    paths = [[0, 1, 3], [0, 1, 4], [0, 2, 5]]
    equal(called(impl, "leaves", EXAMPLE), paths, "The paths", "the example")
    for window in (None, 3):
        check_visible(impl, EXAMPLE, 5, window)


@check(2, "Positions by depth")
def test_positions(impl: Any) -> None:
    """At any place of a text."""
    for parents in SHAPES:
        for start in (0, 1, 17):
            check_positions(impl, list(parents), start)


@check(2, "Ancestors, and nobody else")
def test_masks(impl: Any) -> None:
    """Chains, stars and trees."""
    for parents in SHAPES:
        check_masks(impl, list(parents))


@check(2, "What a node sees")
def test_visible(impl: Any) -> None:
    """Without a window, with and without a text."""
    for parents in SHAPES:
        for start in (0, 1, 6):
            check_visible(impl, list(parents), start, None)


@check(2, "Windows by position")
def test_window(impl: Any) -> None:
    """From one position to more than there are."""
    for parents in SHAPES:
        for start in (0, 3):
            for window in (1, 2, 3, 5, 100):
                check_visible(impl, list(parents), start, window)


@check(1, "The paths of the tree")
def test_leaves(impl: Any) -> None:
    """Also of the root alone."""
    for parents in SHAPES:
        check_leaves(impl, list(parents))


@check(1, "Thirty random trees")
def test_random(impl: Any) -> None:
    """Up to 63 drafts."""
    for seed in seeds(30):
        draw = random.Random(seed)
        parents, start = random_tree(draw), draw.randrange(9)
        check_positions(impl, parents, start)
        check_masks(impl, parents)
        check_leaves(impl, parents)
        check_visible(impl, random_tree(draw, 12), start, draw.choice((None, 1, 4)))
