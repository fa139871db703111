"""The public checks of e19.1: who holds what, then a layer on ranks whose sums are counted."""

import random
from copy import deepcopy
from typing import Any

from minillm_exercises.checking import accept, check, equal, expect, seeds
from minillm_exercises.ranks import Together, together

# The README's layer: two units, two inputs, two outputs.
SMALL = {
    "gate_up": [[1, 1], [3, -1], [0, 1], [1, 1]],
    "gate_up_bias": [0, 0, 0, 0],
    "down": [[1, 2], [0, -1]],
    "down_bias": [1, 1],
}


def shards(impl: Any, layer: dict[str, list], size: int) -> list[dict[str, list]]:
    """What each rank holds; the layer must be as it was."""
    before, found = deepcopy(layer), []
    for rank in range(size):
        case = f"rank {rank} of {size}"
        found.append(accept(impl.shard(layer, rank, size), "shard returns a dictionary", case))
        equal(layer, before, "shard may not change the layer", case)
    return deepcopy(found)


def on_ranks(impl: Any, layer: dict[str, list], x: list[list[int]], size: int) -> Together:
    """The layer on so many ranks, with its sums."""
    held = shards(impl, layer, size)
    rows = deepcopy(x)

    def call(rank: int, add_up: Any) -> Any:
        got = impl.forward(deepcopy(held[rank]), rows, rank, add_up)
        equal(rows, x, "forward may not change x", f"rank {rank} of {size}")
        return accept(got, "forward returns a list of rows")

    return together(size, call, added, "add_up")


def added(parts: list[Any]) -> list[list[int]]:
    """The sum of matrices of one shape."""
    for rank, part in enumerate(parts):
        equal(shape(part), shape(parts[0]), "The shape of what ranks add up", f"rank {rank}")
    matched = zip(*parts, strict=True)
    return [[sum(values) for values in zip(*rows, strict=True)] for rows in matched]


def shape(part: Any) -> list[int]:
    """How long each row is."""
    rows = isinstance(part, list) and all(isinstance(row, list) for row in part)
    expect(rows, f"add_up takes a list of rows, which are lists of numbers; it got {part}.")
    return [len(row) for row in part]


def whole(layer: dict[str, list], x: list[list[int]]) -> list[list[int]]:
    """What one rank alone computes."""
    out = []
    for row in x:
        stack = [
            sum(a * w for a, w in zip(row, weights, strict=True)) + bias
            for weights, bias in zip(layer["gate_up"], layer["gate_up_bias"], strict=True)
        ]
        units = len(stack) // 2
        hidden = [max(0, g) * u for g, u in zip(stack[:units], stack[units:], strict=True)]
        out.append([
            sum(h * w for h, w in zip(hidden, weights, strict=True)) + bias
            for weights, bias in zip(layer["down"], layer["down_bias"], strict=True)
        ])  # fmt: skip
    return out


def layer_of(dice: random.Random, units: int, inputs: int, outputs: int) -> dict[str, list]:
    """Small whole numbers, so that every order of adding gives the same."""

    def numbers(count: int) -> list[int]:
        return [dice.randint(-3, 3) for _ in range(count)]

    return {
        "gate_up": [numbers(inputs) for _ in range(2 * units)],
        "gate_up_bias": [dice.randint(1, 5) for _ in range(2 * units)],
        "down": [numbers(units) for _ in range(outputs)],
        "down_bias": [dice.randint(1, 9) for _ in range(outputs)],
    }


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Two units on two ranks, without biases of the units."""
    done = on_ranks(impl, deepcopy(SMALL), [[1, 2]], 2)
    for rank, got in enumerate(done.results):
        equal(got, [[13, -2]], "The output of the example", f"x=[[1, 2]], rank {rank} of 2")


@check(2, "The heads of a rank")
def test_heads(impl: Any) -> None:
    """Fewer ranks than KV heads, as many, more; every rank holds what its query heads read."""
    for num_heads, num_kv, size in ((4, 2, 1), (4, 2, 2), (8, 4, 2), (6, 3, 3), (8, 8, 4)):
        same_heads(impl, num_heads, num_kv, size, "ranks <= KV heads")
    for num_heads, num_kv, size in ((4, 2, 4), (8, 2, 4), (32, 8, 16), (6, 3, 6), (6, 1, 3)):
        same_heads(impl, num_heads, num_kv, size, "more ranks than KV heads")


def same_heads(impl: Any, num_heads: int, num_kv: int, size: int, which: str) -> None:
    """Each rank's heads, by what each query head reads."""
    group = num_heads // num_kv
    for rank in range(size):
        mine = list(range(rank * num_heads // size, (rank + 1) * num_heads // size))
        want = (mine, sorted({head // group for head in mine}))
        case = f"rank {rank} of {size}, {num_heads} query heads, {num_kv} KV heads"
        equal(
            impl.heads(rank, size, num_heads, num_kv), want, f"The heads of a rank, {which}", case
        )


@check(2, "The part of a layer on each rank")
def test_shard(impl: Any) -> None:
    """The rows and columns of its units, and no more; also where ranks do not divide the units."""
    dice = random.Random(1)
    for units, size in ((4, 2), (6, 3), (5, 2), (10, 4), (3, 1)):
        layer = layer_of(dice, units, 3, 2)
        held = shards(impl, layer, size)
        for rank, mine in enumerate(held):
            case = f"rank {rank} of {size}, {units} units"
            equal(sorted(map(str, mine)), sorted(layer), "The names that shard returns", case)
            cut = [rank * units // size, (rank + 1) * units // size]
            both = [*range(*cut), *(units + at for at in range(*cut))]
            for name in ("gate_up", "gate_up_bias"):
                want = [layer[name][at] for at in both]
                equal(mine[name], want, f"What a rank holds of {name}", case)
            want = [row[slice(*cut)] for row in layer["down"]]
            equal(mine["down"], want, "What a rank holds of down", case)
            equal(mine["down_bias"], layer["down_bias"], "What a rank holds of down_bias", case)


@check(2, "The output on every rank")
def test_output(impl: Any) -> None:
    """Biases everywhere, several rows, one to four ranks."""
    dice = random.Random(2)
    for units, size in ((4, 1), (4, 2), (6, 3), (8, 4), (5, 2)):
        layer = layer_of(dice, units, 3, 4)
        x = [[dice.randint(-3, 3) for _ in range(3)] for _ in range(2)]
        done = on_ranks(impl, layer, x, size)
        for rank, got in enumerate(done.results):
            case = f"rank {rank} of {size}, {units} units"
            equal(got, whole(layer, x), "The output for two rows", case)


@check(2, "One sum, counted")
def test_sums(impl: Any) -> None:
    """However many rows and ranks, the ranks meet once, with one number per row and output."""
    dice = random.Random(3)
    for rows, size in ((1, 2), (3, 2), (5, 4)):
        layer = layer_of(dice, 8, 3, 4)
        x = [[dice.randint(-3, 3) for _ in range(3)] for _ in range(rows)]
        done = on_ranks(impl, layer, x, size)
        case = f"{rows} rows, {size} ranks"
        equal(len(done.meetings), 1, "Calls of add_up for one layer", case)
        equal(shape(done.meetings[0][0]), [4] * rows, "The shape of what is added up", case)


@check(1, "Ten random layers")
def test_random(impl: Any) -> None:
    """Other sizes; the outputs of all ranks are those of one."""
    for seed in seeds(10):
        dice = random.Random(seed)
        units, size = dice.randint(4, 11), dice.randint(1, 4)
        layer = layer_of(dice, units, dice.randint(1, 4), dice.randint(1, 5))
        inputs = len(layer["gate_up"][0])
        x = [[dice.randint(-4, 4) for _ in range(inputs)] for _ in range(dice.randint(1, 4))]
        done = on_ranks(impl, layer, x, size)
        for rank, got in enumerate(done.results):
            equal(got, whole(layer, x), "A random layer", f"rank {rank} of {size}, {units} units")
