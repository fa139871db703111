"""The public checks of e08.2: the victims and their ways, first apart and then together."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from minillm_exercises.checking import accept, check, describe, equal, expect, seeds

Result = list[tuple[str, str]] | None
Price = int | Fraction


@dataclass(frozen=True)
class Running:
    """A running sequence, with the fields of the README."""

    name: str
    arrival: int
    computed: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Need:
    """The other arguments of a call."""

    needy: str
    missing: int
    token_price: Price = 1
    block_price: Price = 1


EXAMPLE = [
    Running("a", 1, 20, (0, 1, 2)),
    Running("b", 2, 15, (0, 3)),
    Running("c", 3, 17, (0, 4, 5)),
    Running("d", 4, 9, (6, 7)),
    Running("e", 5, 11, (6, 8)),
]


def crowd(*computed: int) -> list[Running]:
    """Sequences a, b, c ... in the order of arrival, each with two blocks of its own."""
    return [
        Running("abcdefgh"[i], i + 1, tokens, (2 * i, 2 * i + 1))
        for i, tokens in enumerate(computed)
    ]


def said(running: Sequence[Running], need: Need) -> str:
    """How to repeat a case."""
    rows = [f"{s.name}: {s.arrival}, {s.computed}, {s.blocks}" for s in running]
    return (
        f"needy {need.needy}, missing {need.missing}, token_price {need.token_price}, "
        f"block_price {need.block_price}; "
        f"name: arrival, computed, blocks are {'; '.join(rows)}"
    )


def ask(impl: Any, running: Sequence[Running], need: Need) -> Any:
    """Return the learner's decision; the list must not have changed."""
    mine = list(running)
    arguments = (need.needy, need.missing, need.token_price, need.block_price)
    got = accept(impl.preempt(mine, *arguments), "The result", said(running, need))
    order = [sequence.name for sequence in mine]
    want = [sequence.name for sequence in running]
    equal(order, want, "The list of the running sequences after the call", said(running, need))
    return got


def right(impl: Any, what: str, want: Result, running: Sequence[Running], need: Need) -> None:
    """Compare the whole decision."""
    got, case = ask(impl, running, need), said(running, need)
    some(got, want, what, case)
    parts(got, case)
    equal(got, want, what, case)


def victims(impl: Any, what: str, want: str | None, running: list[Running], need: Need) -> None:
    """Compare the victims in order, not their ways; None if all together are too few."""
    got, case = ask(impl, running, need), said(running, need)
    some(got, want, what, case)
    names = parts(got, case)[0]
    equal(names, None if want is None else list(want), what, case)


def ways(impl: Any, what: str, want: str, running: list[Running], need: Need) -> None:
    """How the victims are preempted; `want` has one letter, r or s, for each."""
    got, case = ask(impl, running, need), said(running, need)
    full = ["swap" if letter == "s" else "recompute" for letter in want]
    some(got, full, what, case)
    equal(parts(got, case)[1], full, what, case)


def some(got: Any, want: object, what: str, case: str) -> None:
    """Fail if None is returned where there are victims."""
    message = f"expected {describe(want)}, got None, which says that all together are too few."
    expect(got is not None or want is None, f"{what} ({case}): {message}", got is None)


def parts(got: Any, case: str) -> tuple[Any, Any]:
    """Names and ways of a result that has the right form."""
    if got is None:
        return None, None
    right = type(got) in (tuple, list)
    right = right and all(type(pair) in (tuple, list) and len(pair) == 2 for pair in got)
    right = right and all(type(word) is str for pair in got for word in pair)
    form = 'expected None or [(name, "swap" or "recompute"), ...]'
    expect(right, f"The result ({case}): {form}, got {got!r}.", "form")
    return [name for name, _ in got], [way for _, way in got]


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Five sequences that share blocks, with three numbers of missing blocks."""
    first = [("e", "swap"), ("d", "recompute")]
    right(impl, "The worked example", first, EXAMPLE, Need("b", 3, 2, 5))
    want = [*first, ("c", "swap")]
    right(impl, "The worked example with 5 missing", want, EXAMPLE, Need("b", 5, 2, 5))
    right(impl, "The worked example with 6 missing", None, EXAMPLE, Need("b", 6, 2, 5))


@check(2, "Victims: from the latest arrival on, and no more than needed")
def test_order(impl: Any) -> None:
    """Each sequence has two blocks of its own; the list may be in another order."""
    running = crowd(9, 8, 7, 6, 5)
    mixed = [running[i] for i in (3, 0, 4, 2, 1)]
    for missing, want in ((0, ""), (1, "e"), (2, "e"), (3, "ed"), (4, "ed"), (5, "edc")):
        what = f"The victims with missing={missing}"
        victims(impl, what, want, running, Need("a", missing))
        victims(impl, f"{what}, in a mixed list", want, mixed, Need("a", missing))


@check(2, "Victims: later arrivals only, and none if they are too few")
def test_protected(impl: Any) -> None:
    """Four are running; no sequence is preempted if the later arrivals free too few blocks."""
    running = crowd(9, 8, 7, 6)
    for needy, missing, want in (
        ("a", 6, "dcb"),
        ("a", 7, None),
        ("b", 4, "dc"),
        ("b", 5, None),
        ("c", 2, "d"),
        ("c", 3, None),
        ("d", 1, None),
        ("d", 0, ""),
    ):
        what = f"The victims when {needy} needs {missing} blocks of four sequences with two each"
        victims(impl, what, want, running, Need(needy, missing))


@check(2, "Shared blocks: free when the last holder has given them up")
def test_shared(impl: Any) -> None:
    """Blocks shared with running sequences, among victims, and by three."""
    stay = [Running("a", 1, 9, (0, 1)), Running("b", 2, 9, (0, 2)), Running("c", 3, 9, (0, 3))]
    victims(impl, "Block 0 stays with a", "cb", stay, Need("a", 2))
    victims(impl, "Block 0 stays with a: two are all", None, stay, Need("a", 3))
    pair = [
        Running("a", 1, 9, (0,)),
        Running("b", 2, 9, (4, 5)),
        Running("c", 3, 9, (1, 2)),
        Running("d", 4, 9, (1, 2)),
    ]
    victims(impl, "d frees no block, and is a victim all the same", "dc", pair, Need("a", 1))
    victims(impl, "c and d together free both blocks", "dc", pair, Need("a", 2))
    victims(impl, "c and d together free both blocks, b one more", "dcb", pair, Need("a", 3))
    three = [Running("a", 1, 9, (0,))]
    three += [Running(name, i, 9, (7, i)) for i, name in enumerate("bcd", 2)]
    for missing, want in ((1, "d"), (2, "dc"), (3, "dcb"), (4, "dcb"), (5, None)):
        what = f"Three share a block, {missing} blocks are missing"
        victims(impl, what, want, three, Need("a", missing))


@check(2, "Ways: the cheaper one, and a swap moves each block twice")
def test_prices(impl: Any) -> None:
    """A token costs 2; each sequence has two blocks, so a swap is four moves."""
    running = crowd(9, 5, 6, 7)
    high = Need("a", 6, 2, 6)
    ways(impl, "Recomputing for 14, 12 and 10, or swapping for 24", "rrr", running, high)
    need = Need("a", 6, 2, 3)
    ways(impl, "Recomputing for 14, 12 and 10, or swapping for 12", "srr", running, need)
    low = Need("a", 6, 2, Fraction(12, 5))
    ways(impl, "Recomputing for 14, 12 and 10, or swapping for 48/5", "sss", running, low)
    shared = [
        Running("a", 1, 9, (0, 1, 2)),
        Running("b", 2, 7, (0, 1, 3)),
    ]
    what = "Recomputing for 14, or swapping three blocks, two of them shared, for 18"
    ways(impl, what, "r", shared, Need("a", 1, 2, 3))


@check(1, "Prices that differ by less than a float holds")
def test_exact(impl: Any) -> None:
    """Fractions near each other, integers beyond 2**53, and prices of 0."""
    running = crowd(9, 4)
    tiny = Fraction(1, 10**20)
    ways(impl, "A block is cheaper by 1/10**20", "s", running, Need("a", 1, 1, 1 - tiny))
    ways(impl, "A block is more expensive by 1/10**20", "r", running, Need("a", 1, 1, 1 + tiny))
    big = 10**18
    what = "Swapping is cheaper by 4 of 4 * 10**18"
    ways(impl, what, "s", running, Need("a", 1, big, big - 1))
    ways(impl, "Both are free: recompute", "r", running, Need("a", 1, 0, 0))
    third = Fraction(1, 3)
    ways(impl, "Thirds at equal cost", "r", running, Need("a", 1, third, third))
    what = "Recomputing for 4/3, or swapping for 1"
    ways(impl, what, "s", running, Need("a", 1, third, Fraction(1, 4)))


@check(3, "Two hundred random cases")
def test_everything(impl: Any) -> None:
    """Few blocks, so that many are shared; few tokens, so that costs are often equal."""
    for seed in seeds(200):
        draw = random.Random(seed)
        arrivals = draw.sample(range(100), draw.randint(1, 7))
        running = [
            Running(name, arrival, draw.randint(1, 24), blocks(draw))
            for name, arrival in zip("abcdefg", arrivals, strict=False)
        ]
        prices = [Fraction(draw.randint(1, 9), draw.choice((1, 1, 2, 3))) for _ in range(2)]
        needy, missing = draw.choice(running).name, draw.randint(0, 7)
        need = Need(needy, missing, prices[0], prices[1])
        right(impl, "A random case", reference(running, need), running, need)


def blocks(draw: random.Random) -> tuple[int, ...]:
    """Some blocks of twelve."""
    return tuple(draw.sample(range(12), draw.randint(1, 4)))


def reference(running: list[Running], need: Need) -> Result:
    """Try the latest arrival alone, then the latest two, and so on, until they are enough."""
    ordered = sorted(running, key=lambda sequence: sequence.arrival)
    place = [sequence.name for sequence in ordered].index(need.needy)
    held = {block for sequence in running for block in sequence.blocks}
    for first in range(len(ordered), place, -1):
        kept = {block for sequence in ordered[:first] for block in sequence.blocks}
        if len(held - kept) >= need.missing:
            return decided(ordered[first:][::-1], need)
    return None


def decided(row: list[Running], need: Need) -> list[tuple[str, str]]:
    """The cheaper way of each victim."""
    found = []
    for victim in row:
        saved = victim.computed * need.token_price - len(victim.blocks) * need.block_price * 2
        found.append((victim.name, "swap" if saved > 0 else "recompute"))
    return found
