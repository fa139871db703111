"""The public checks of e17.2: walks, tokens, and moves that are carried out one after another."""

import random
from itertools import pairwise
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds

PARENTS, DRAFTS, SAMPLES = [-1, -1, 0, 0, 1], [7, 9, 8, 4, 6], [9, 1, 6, 0, 0, 3]
Walk = tuple[list[int], list[int], list[int]]


def longest(parents: list[int], drafts: list[int], samples: list[int]) -> list[int]:
    """The longest path of which each draft was sampled, out of all paths."""
    best = [0]
    for node in range(1, len(parents) + 1):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0] - 1] + 1)
        right = all(samples[a] == drafts[b - 1] for a, b in pairwise(path))
        if right and len(path) > len(best):
            best = path
    return best


def called(impl: Any, name: str, *given: Any) -> list[Any]:
    """What a function returns, as a list; its arguments are as they were."""
    case = f"{name}({', '.join(map(repr, given))})"[:300]
    copies = [list(each) if isinstance(each, list) else each for each in given]
    got = accept(getattr(impl, name)(*copies), f"{name} returns a list", case)
    expect(isinstance(got, list | tuple), f"{name} returns a list; it returned {got!r:.200}.")
    equal(copies, list(given), f"{name} may not change its arguments", case)
    return list(got)


def check_walk(impl: Any, parents: list[int], drafts: list[int], samples: list[int]) -> list[int]:
    want = longest(parents, drafts, samples)
    case = f"walk({parents}, {drafts}, {samples})"[:300]
    equal(called(impl, "walk", parents, drafts, samples), want, "The accepted nodes", case)
    return want


def copied(got: list[Any], case: str) -> list[tuple[int, int]]:
    """The pairs of the result."""
    pairs = []
    for pair in got:
        good = isinstance(pair, list | tuple) and len(pair) == 2
        good = good and all(type(each) is int for each in pair)
        expect(good, f"A move is a pair of slots, (source, target); one is {pair!r:.100}. ({case})")
        pairs.append((pair[0], pair[1]))
    return pairs


def rings(sources: list[int], targets: list[int]) -> int:
    """How many rings of slots wait for each other."""
    comes_from = {t: s for s, t in zip(sources, targets, strict=True) if s != t}
    count = 0
    while comes_from:
        first, source = comes_from.popitem()
        while source in comes_from:
            source = comes_from.pop(source)
        # Popped in any order, a chain is met in parts: only a ring comes back.
        count += source == first
    return count


def check_moves(
    got: list[Any], sources: list[int], targets: list[int], spare: int, case: str
) -> None:
    """Carried out on slots that hold their own number."""
    pairs = copied(got, case)
    size = max([*sources, *targets, spare]) + 3
    for source, target in pairs:
        inside = 0 <= source < size and 0 <= target < size
        expect(inside, f"The move {source, target} leaves the slots. ({case})", (source, target))
    slots = list(range(size))
    for source, target in pairs:
        slots[target] = slots[source]
    for source, target in zip(sources, targets, strict=True):
        what = f"What is in slot {target} after {pairs}, if each slot holds its own number before"
        equal(slots[target], source, what[:300], case)
    others = [each for each in range(size) if each not in (*targets, spare)]
    equal([slots[each] for each in others], others, "The other slots, which stay as they are", case)
    displaced = sum(s != t for s, t in zip(sources, targets, strict=True))
    want = displaced + rings(sources, targets)
    equal(len(pairs), want, "The number of copies", f"{case}: {pairs}"[:300])


def check_case(impl: Any, sources: list[int], targets: list[int], spare: int) -> None:
    case = f"moves({sources}, {targets}, {spare})"[:300]
    check_moves(called(impl, "moves", sources, targets, spare), sources, targets, spare, case)


def check_commit(
    impl: Any, path: list[int], places: list[int], start: int, table: list[int], size: int
) -> None:
    """The spare slot is behind all blocks."""
    spare = (max(table) + 1) * size
    slots = [block * size + offset for block in table for offset in range(size)]
    sources = [slots[start + places[node]] for node in path]
    targets = slots[start : start + len(path)]
    case = f"commit({path}, {places}, {start}, {table}, {size}, {spare})"[:300]
    got = called(impl, "commit", path, places, start, table, size, spare)
    check_moves(got, sources, targets, spare, case)


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """A walk, its tokens, moves of both kinds, and blocks."""
    equal(called(impl, "walk", PARENTS, DRAFTS, SAMPLES), [0, 2, 5], "The nodes", "the example")
    equal(called(impl, "emitted", [0, 2, 5], SAMPLES), [9, 6, 3], "The tokens", "the example")
    check_case(impl, [4, 5], [3, 4], 9)
    check_case(impl, [4, 3], [3, 4], 9)
    equal(impl.full_blocks([0, 2, 5], 14, 16), 1, "The full blocks", "the example")


@check(2, "From node to child")
def test_walk(impl: Any) -> None:
    """The same tokens in all branches; the accepted child is not the first, or there is none."""
    for samples in ([1, 0, 0, 0], [2, 0, 0, 0], [5, 0, 0, 0]):
        check_walk(impl, [-1, -1, -1], [1, 2, 3], samples)
    for samples in ([2, 1, 1, 0, 0, 0], [1, 2, 1, 0, 0, 0], [2, 2, 1, 0, 0, 0], [2, 2, 2, 1, 1, 1]):
        check_walk(impl, [-1, -1, 0, 0, 1], [1, 2, 1, 2, 1], samples)
    check_walk(impl, [], [], [4])
    check_walk(impl, [-1, 0, 1, 2], [4, 4, 4, 4], [4, 4, 4, 4, 4])
    check_walk(impl, [-1, 0, 1, 2], [4, 4, 4, 4], [4, 4, 5, 4, 4])


@check(1, "The new tokens")
def test_emitted(impl: Any) -> None:
    """Accepted drafts and one more; always at least one."""
    for path, samples, want in (
        ([0], [5, 6], [5]),
        ([0, 2], [5, 6, 7], [5, 7]),
        ([0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
    ):
        case = f"emitted({path}, {samples})"
        equal(called(impl, "emitted", path, samples), want, "The new tokens", case)


@check(2, "Moves without rings")
def test_chains(impl: Any) -> None:
    """Towards lower slots, towards higher ones, and both at once."""
    check_case(impl, [], [], 5)
    check_case(impl, [3, 4], [3, 4], 5)
    check_case(impl, [0, 2, 3, 5], [0, 1, 2, 3], 9)
    check_case(impl, [1, 2, 3], [2, 3, 4], 9)
    check_case(impl, [0, 3, 1], [0, 1, 2], 9)
    check_case(impl, [6, 2, 5, 3], [5, 3, 2, 7], 9)


@check(2, "Rings, by way of the spare slot")
def test_rings(impl: Any) -> None:
    """One ring, several, and chains beside them."""
    check_case(impl, [1, 2], [2, 1], 9)
    check_case(impl, [1, 2, 3, 4], [2, 3, 4, 1], 0)
    check_case(impl, [1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 9)
    check_case(impl, [5, 6, 1, 3, 2], [6, 5, 2, 4, 3], 9)
    check_case(impl, [7, 8, 2, 3, 1], [8, 7, 3, 1, 2], 9)


@check(2, "A path in its blocks")
def test_commit(impl: Any) -> None:
    """Blocks in no order, with borders anywhere."""
    for start in (0, 2, 3, 5):
        for path in ([0], [0, 2], [0, 1, 2], [0, 2, 5], [0, 3, 4, 6]):
            check_commit(impl, path, list(range(7)), start, [5, 1, 7, 0], 4)
            check_commit(impl, path, [2, 0, 1, 6, 3, 5, 4], start, [2, 6, 4, 1, 9, 8, 3], 2)


@check(1, "Blocks to share")
def test_full(impl: Any) -> None:
    """Where the path just fills a block, and where only its old slots would."""
    for path, start, size in (
        ([0], 0, 1), ([0], 15, 16), ([0], 14, 16), ([0, 9], 14, 16), ([0, 9], 13, 16),
        ([0, 3, 8], 29, 16), ([0, 3, 8], 30, 16), ([0, 1, 2, 3, 4], 3, 4),
    ):  # fmt: skip
        want = (start + len(path)) // size
        case = f"full_blocks({path}, {start}, {size})"
        equal(impl.full_blocks(list(path), start, size), want, "The full blocks", case)


@check(1, "Thirty random trees")
def test_random(impl: Any) -> None:
    """From parents to moves; places in any order."""
    for seed in seeds(30):
        draw = random.Random(seed)
        count = draw.randint(1, 20)
        parents = [draw.randrange(max(-1, i - 4), i) for i in range(count)]
        used: set[tuple[int, int]] = set()
        drafts = []
        for parent in parents:
            free = [t for t in range(40) if (parent, t) not in used]
            drafts.append(draw.choice(free[:4]))
            used.add((parent, drafts[-1]))
        samples = [draw.randrange(4) for _ in range(count + 1)]
        path = check_walk(impl, parents, drafts, samples)
        places = list(range(count + 1))
        if draw.random() < 0.7:
            draw.shuffle(places)
        size = draw.choice((1, 2, 4, 16))
        start = draw.randrange(9)
        blocks = (start + count) // size + 1
        check_commit(impl, path, places, start, draw.sample(range(2 * blocks), blocks), size)
        sources, targets = (draw.sample(range(12), 7) for _ in range(2))
        check_case(impl, sources, targets, 12)
