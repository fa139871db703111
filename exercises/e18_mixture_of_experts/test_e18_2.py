"""The public checks of e18.2: copies, placements that are judged by their balance, rows, turns."""

import random
from collections import Counter
from fractions import Fraction
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, seeds

LOADS, COUNTS = [8, 2, 1, 1], [3, 1, 1, 1]  # the README's
PLACEMENT = [[0, 0, 3], [0, 1, 2]]
CHOSEN = [0, 0, 1, 0, 0, 3]


def given_out(loads: list[int], spares: int) -> list[int]:
    """The copies of each expert, by exact fractions."""
    counts = [1] * len(loads)
    for _ in range(spares):
        hottest = max(range(len(loads)), key=lambda e: (Fraction(loads[e], counts[e]), -e))
        counts[hottest] += 1
    return counts


def packed(loads: list[int], counts: list[int], gpus: int) -> list[list[int]]:
    """Largest first."""
    slots, each = sum(counts) // gpus, [Fraction(a, b) for a, b in zip(loads, counts, strict=True)]
    held: list[list[int]] = [[] for _ in range(gpus)]
    order = [expert for expert, count in enumerate(counts) for _ in range(count)]
    for expert in sorted(order, key=lambda e: -each[e]):
        free = [gpu for gpu in held if len(gpu) < slots]
        min(free, key=lambda gpu: sum(each[e] for e in gpu)).append(expert)
    return held


def sent(chosen: list[int], placement: list[list[int]]) -> list[int]:
    """The GPU of each row."""
    seen: Counter[int] = Counter()
    rows = []
    for expert in chosen:
        holders = [gpu for gpu, held in enumerate(placement) for each in held if each == expert]
        rows.append(holders[seen[expert] % len(holders)])
        seen[expert] += 1
    return rows


def evenness(loads: list[int], counts: list[int], placement: list[list[int]]) -> float:
    """Mean over largest load of a GPU."""
    sums = [sum(loads[e] / counts[e] for e in held) for held in placement]
    return sum(sums) / len(sums) / max(sums)


def zipf(num_experts: int, seed: int, exponent: float = 0.8) -> list[int]:
    """Loads by Zipf's law, the popular experts anywhere."""
    loads = [round(10_000 / rank**exponent) for rank in range(1, num_experts + 1)]
    random.Random(seed).shuffle(loads)
    return loads


def same_copies(impl: Any, loads: list[int], spares: int, what: str) -> None:
    """Exactly these copies."""
    given = list(loads)
    got = impl.copies(given, spares)
    equal(given, loads, "copies may not change the loads")
    equal(got, given_out(loads, spares), what, f"loads {loads}, {spares} spares")


def good_placement(impl: Any, loads: list[int], counts: list[int], gpus: int, least: float) -> None:
    """Every copy once, every slot filled, and balanced enough."""
    mine, numbers = list(loads), list(counts)
    got = accept(impl.pack(mine, numbers, gpus), "pack returns a list per GPU")
    equal((mine, numbers), (loads, counts), "pack may not change its inputs")
    case = f"loads {loads}, copies {counts}, {gpus} GPUs"
    slots = sum(counts) // gpus
    equal([len(held) for held in got], [slots] * gpus, "The copies on each GPU", case)
    found = Counter(expert for held in got for expert in held)
    mine = [found[expert] for expert in range(len(counts))]
    equal(mine, counts, "How often each expert is placed", case)
    even = evenness(loads, counts, got)
    expect(
        even >= least - 1e-9,
        f"The balance of the loads is {even:.2f}; it should be at least {least:.2f} ({case}).",
        observed=round(even, 9),
    )


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Four experts, two spares, two GPUs."""
    same_copies(impl, LOADS, 2, "The copies of the example")
    good_placement(impl, LOADS, COUNTS, 2, 6 / (2 * 19 / 6))
    rows = impl.send(list(CHOSEN), [list(held) for held in PLACEMENT])
    equal(rows, [0, 0, 1, 1, 0, 0], "The GPUs of the rows of the example")
    close(impl.balance(rows, 2), 0.75, "The balance of the example")


@check(2, "The experts that get the spares")
def test_copies(impl: Any) -> None:
    """No spares, equal loads, one expert that has nearly all, loads by Zipf's law."""
    same_copies(impl, [3, 1, 2], 0, "The copies without spares")
    same_copies(impl, [4, 4, 4, 4], 3, "The copies where loads are equal")
    same_copies(impl, [1, 9, 2], 3, "The copies where one expert has most")
    same_copies(impl, [6, 5, 1, 1], 2, "The copies where two experts have much")
    same_copies(impl, [0, 0, 7], 2, "The copies where two experts had nothing")
    for num_experts, spares in ((8, 4), (16, 16), (64, 8)):
        same_copies(impl, zipf(num_experts, 1), spares, "The copies by Zipf's law")


@check(2, "A placement with full slots")
def test_slots(impl: Any) -> None:
    """One large load, which fills a slot like the small ones."""
    for loads, gpus in (([9, 1, 1, 1], 2), ([50, 1, 1, 1, 1, 1], 3), ([4, 4], 2), ([5, 3, 2], 1)):
        counts = [1] * len(loads)
        least = evenness(loads, counts, packed(loads, counts, gpus))
        good_placement(impl, loads, counts, gpus, least)


@check(2, "Balance of small placements")
def test_small(impl: Any) -> None:
    """As balanced as largest first."""
    for loads, gpus in (([1, 2, 3, 4], 2), ([7, 5, 4, 3, 3, 2], 2), ([5, 5, 4, 1, 2, 1], 3)):
        counts = [1] * len(loads)
        least = evenness(loads, counts, packed(loads, counts, gpus))
        good_placement(impl, loads, counts, gpus, least)
    good_placement(impl, [12, 3, 3, 2], [3, 1, 1, 1], 3, evenness(
        [12, 3, 3, 2], [3, 1, 1, 1], packed([12, 3, 3, 2], [3, 1, 1, 1], 3)))  # fmt: skip


@check(2, "Balance with spares, at least 0.9")
def test_balance_of_placements(impl: Any) -> None:
    """Loads by Zipf's law with the copies that the README gives them."""
    for num_experts, gpus, spares in ((64, 8, 8), (24, 4, 8), (16, 2, 4), (128, 16, 32)):
        for seed in range(3):
            loads = zipf(num_experts, seed)
            good_placement(impl, loads, given_out(loads, spares), gpus, 0.9)


@check(2, "The copy of each row")
def test_send(impl: Any) -> None:
    """One copy each, several, two of them on one GPU."""
    dice = random.Random(1)
    for placement in ([[0, 1], [2, 3]], [[0, 0, 1], [0, 2, 3]], [[1, 0], [0, 2], [3, 0]]):
        for count in (1, 5, 12):
            chosen = [dice.randrange(4) for _ in range(count)]
            got = impl.send(list(chosen), [list(held) for held in placement])
            case = f"chosen {chosen}, placement {placement}"
            equal(got, sent(chosen, placement), "The GPUs of the rows", case)
    got = impl.send([0, 1, 0, 1, 0, 1], [[0, 1], [0, 1]])
    equal(got, [0, 0, 1, 1, 0, 0], "The GPUs of the rows, two experts taking turns")


@check(1, "The balance of rows")
def test_balance(impl: Any) -> None:
    """GPUs without rows count, and no rows are no harm."""
    for rows, gpus, want in (
        ([0, 1, 2], 3, 1.0),
        ([0, 0, 0, 1], 2, 2 / 3),
        ([1, 1], 4, 0.25),
        ([0, 0, 0, 1, 1, 2], 3, 2 / 3),
        ([0], 1, 1.0),
    ):
        close(impl.balance(list(rows), gpus), want, "The balance of rows", f"{rows}, {gpus} GPUs")
    close(impl.balance([], 3), 1.0, "The balance of no rows")


@check(1, "Ten random models")
def test_random(impl: Any) -> None:
    """Copies, a placement and the rows of a step, from the submission alone."""
    for seed in seeds(10):
        dice = random.Random(seed)
        gpus, slots = dice.randint(2, 4), dice.randint(3, 5)
        num_experts = gpus * slots - dice.randint(0, 3)
        loads = [dice.randint(1, 60) for _ in range(num_experts)]
        counts = given_out(loads, gpus * slots - num_experts)
        same_copies(impl, loads, gpus * slots - num_experts, "The copies of a random model")
        least = evenness(loads, counts, packed(loads, counts, gpus))
        good_placement(impl, loads, counts, gpus, min(0.9, least))
        placement = accept(impl.pack(list(loads), list(counts), gpus), "pack")
        chosen = dice.choices(range(num_experts), weights=loads, k=30)
        rows = accept(impl.send(list(chosen), placement), "send")
        equal(rows, sent(chosen, placement), "The GPUs of the rows of a random model")
        want = len(rows) / gpus / max(Counter(rows).values())
        close(impl.balance(list(rows), gpus), want, "The balance of a random model")
        expect(len(rows) == len(chosen), "send returns a GPU for each row.")
