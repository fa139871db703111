"""The public checks of e20.2: costs of stages, cuts against all cuts there are, tables."""

import itertools
import random
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds


def costs_of(counts: list[int], layers: list[int], embedding: int, head: int) -> list[int]:
    """What each stage costs."""
    rest = iter(layers)
    found = [sum(itertools.islice(rest, count)) for count in counts]
    found[0] += embedding
    found[-1] += head
    return found


def best_of_all(layers: list[int], embedding: int, head: int, stages: int) -> int:
    """The slowest stage of the best cut, by trying every cut."""
    found = []
    for places in itertools.combinations(range(1, len(layers)), stages - 1):
        ends = [0, *places, len(layers)]
        counts = [b - a for a, b in itertools.pairwise(ends)]
        found.append(max(costs_of(counts, layers, embedding, head)))
    return min(found)


def best_of_many(layers: list[int], embedding: int, head: int, stages: int) -> int:
    """The same for many layers: the smallest limit that stages which are filled up can keep."""
    costs = [embedding + layers[0], *layers[1:-1], layers[-1] + head]
    sums = {sum(costs[a:b]) for a in range(len(costs)) for b in range(a + 1, len(costs) + 1)}
    for limit in sorted(sums):
        used, load = 1, 0
        for cost in costs:
            used, load = (used, load + cost) if load + cost <= limit else (used + 1, cost)
        if used <= stages and max(costs) <= limit:
            return limit
    return 0


def cut_well(
    impl: Any, what: str, layers: list[int], embedding: int, head: int, stages: int, want: int
) -> None:
    """A cut whose slowest stage costs what it has to."""
    given = list(layers)
    shown = f"{layers}" if len(layers) <= 12 else f"{len(layers)} layers"
    case = f"cut({shown}, {embedding}, {head}, {stages})"
    counts = accept(impl.cut(given, embedding, head, stages), "cut returns a list", case)
    equal(given, layers, "cut may not change the layers", case)
    expect(isinstance(counts, list), f"{case} returns a list; it returned {counts!r}.")
    good = len(counts) == stages and all(type(each) is int and each >= 1 for each in counts)
    message = f"{case}: {counts} is no cut; it has a number of layers, 1 or more, for each stage."
    expect(good, message, good or counts)
    equal(sum(counts), len(layers), "The layers of all stages together", f"{case} = {counts}")
    slowest = max(costs_of(counts, layers, embedding, head))
    equal(slowest, want, what, f"{case} = {counts}")


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Six layers of cost 1 and a head of cost 3, on two and three stages."""
    for counts, want in (((3, 3), [3, 6]), ((4, 2), [4, 5]), ((2, 3, 1), [2, 3, 4])):
        equal(impl.times(list(counts), [1] * 6, 0, 3), want, f"times({list(counts)}, ...)")
    what = "The slowest stage of the example"
    cut_well(impl, what, [1] * 6, 0, 3, 2, 5)
    cut_well(impl, what, [1] * 6, 0, 3, 3, 4)
    equal(impl.tables(2, 100, True), [100, 100], "tables(2, 100, tied=True)")
    equal(impl.tables(1, 100, True), [100], "tables(1, 100, tied=True)")


@check(1, "The cost of each stage")
def test_times(impl: Any) -> None:
    """Layers of different costs, both ends, one stage."""
    layers = [3, 1, 4, 1, 5, 9]
    for counts in ([6], [2, 4], [1, 1, 4], [1, 2, 1, 2]):
        for embedding, head in ((0, 0), (2, 0), (0, 7), (2, 7)):
            case = f"times({counts}, {layers}, {embedding}, {head})"
            got = impl.times(list(counts), list(layers), embedding, head)
            equal(got, costs_of(counts, layers, embedding, head), "The costs of stages", case)


@check(1, "Equal layers")
def test_equal(impl: Any) -> None:
    """Numbers that stages divide, and numbers that they do not."""
    for count, stages in ((8, 4), (7, 2), (10, 4), (5, 5), (4, 1), (11, 3)):
        want = -(-count // stages)
        cut_well(impl, "The slowest stage of equal layers", [1] * count, 0, 0, stages, want)


@check(2, "With a head")
def test_head(impl: Any) -> None:
    """Heads from half a layer to more than all layers."""
    for head in (1, 3, 5, 9, 40):
        for stages in (2, 3, 4):
            want = best_of_all([2] * 9, 0, head, stages)
            cut_well(impl, "The slowest stage, with a head", [2] * 9, 0, head, stages, want)


@check(2, "With an embedding")
def test_embedding(impl: Any) -> None:
    """An embedding alone, and beside a head."""
    for embedding, head in ((5, 0), (9, 0), (4, 6), (12, 12), (40, 3)):
        for stages in (2, 3, 4):
            want = best_of_all([2] * 9, embedding, head, stages)
            what = "The slowest stage, with an embedding"
            cut_well(impl, what, [2] * 9, embedding, head, stages, want)


@check(2, "Layers of different costs")
def test_different(impl: Any) -> None:
    """A large layer at each place; a mixture whose first layers are small."""
    for place in range(7):
        layers = [2] * 7
        layers[place] = 9
        for stages in (2, 3):
            want = best_of_all(layers, 0, 4, stages)
            cut_well(impl, "The slowest stage, one large layer", layers, 0, 4, stages, want)
    for layers in ([1, 1, 1, 8, 8, 8, 8, 8], [5, 1, 4, 1, 3, 1, 6, 2, 2], [1, 9, 1, 1, 1, 9, 1]):
        for stages in (2, 3, 4):
            want = best_of_all(layers, 2, 5, stages)
            cut_well(impl, "The slowest stage, different layers", layers, 2, 5, stages, want)


@check(1, "Eighty layers on eight stages")
def test_large(impl: Any) -> None:
    """Too many cuts to try them all."""
    dice = random.Random(3)
    for layers in ([6] * 80, [dice.randint(3, 9) for _ in range(80)]):
        want = best_of_many(layers, 2, 31, 8)
        cut_well(impl, "The slowest stage of 80 layers", layers, 2, 31, 8, want)


@check(1, "Tables of the vocabulary")
def test_tables(impl: Any) -> None:
    """One stage, two, and some in the middle; tied and not."""
    for stages in (1, 2, 3, 5):
        for tied in (True, False):
            ends = [[1 if tied else 2], [1, 1], [1, 0, 1], [], [1, 0, 0, 0, 1]][stages - 1]
            case = f"tables({stages}, 64, tied={tied})"
            want = [64 * each for each in ends]
            equal(impl.tables(stages, 64, tied), want, "Bytes of tables", case)


@check(1, "Twenty random models")
def test_random(impl: Any) -> None:
    """Any layers and ends."""
    for seed in seeds(20):
        dice = random.Random(seed)
        layers = [dice.randint(1, 20) for _ in range(dice.randint(1, 11))]
        embedding, head = dice.choice((0, dice.randint(1, 30))), dice.randint(0, 50)
        stages = dice.randint(1, min(5, len(layers)))
        want = best_of_all(layers, embedding, head, stages)
        cut_well(impl, "The slowest stage of a random model", layers, embedding, head, stages, want)
