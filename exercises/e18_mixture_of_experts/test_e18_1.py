"""The public checks of e18.1: routes, batches, then a layer whose calls are counted."""

import random
from copy import deepcopy
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, seeds

Rows = list[list[float]]
Pairs = list[tuple[int, float]]

# The README's layer.
X = [[4.0, 0.0], [-5.0, 10.0], [2.0, 6.0]]
SCORES = [[0.1, 0.6, 0.2, 0.1], [0.06, 0.48, 0.14, 0.32], [0.1, 0.4, 0.4, 0.1]]
BATCHES: list[Pairs] = [[], [(0, 0.75), (1, 0.6), (2, 0.5)], [(0, 0.25), (2, 0.5)], [(1, 0.4)]]


class Experts:
    """Experts that are not linear, and what they were called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Rows]] = []

    def __call__(self, expert: int, rows: Rows) -> Rows:
        rows = accept(rows, f"The rows that run({expert}, rows) gets")
        good = isinstance(rows, list) and all(isinstance(row, list) for row in rows)
        expect(good, f"run takes an expert and a list of rows; it got {rows}.")
        self.calls.append((expert, deepcopy(rows)))
        return [self.one(expert, row) for row in rows]

    @staticmethod
    def one(expert: int, row: list[float]) -> list[float]:
        """A row through an expert: no two of them do the same."""
        if expert == 1:
            return [2 * each for each in row]
        if expert == 2:
            return row[::-1]
        if expert == 3:
            return [max(0.0, each) for each in row]
        return [abs(each) + expert for each in row]


def routed(scores: list[float], bias: list[float], k: int) -> Pairs:
    """What a token's route is."""
    order = sorted(range(len(scores)), key=lambda e: (-(scores[e] + bias[e]), e))[:k]
    return [(e, scores[e] / sum(scores[each] for each in order)) for e in order]


def batched(routes: list[Pairs], num_experts: int) -> list[Pairs]:
    """The tokens of each expert."""
    return [
        [(token, weight) for token, pairs in enumerate(routes) for e, weight in pairs if e == own]
        for own in range(num_experts)
    ]


def layer(x: Rows, batches: list[Pairs]) -> Rows:
    """The output of the tokens."""
    out = [[0.0] * len(row) for row in x]
    for expert, batch in enumerate(batches):
        for token, weight in batch:
            row = Experts.one(expert, x[token])
            out[token] = [a + weight * b for a, b in zip(out[token], row, strict=True)]
    return out


def same_route(impl: Any, scores: list[float], bias: list[float], k: int, what: str) -> None:
    """The experts first, then their weights."""
    case = f"scores {rounded(scores)}, bias {rounded(bias)}, k = {k}"
    got = accept(impl.route(list(scores), list(bias), k), "route returns pairs", case)
    want = routed(scores, bias, k)
    equal([each[0] for each in pairs(got, "route")], [each[0] for each in want], what, case)
    weights = [each[1] for each in got]
    close(weights, [each[1] for each in want], "The weights of a token", case)


def pairs(got: Any, name: str) -> Any:
    """A list of pairs, or a sentence."""
    good = isinstance(got, list) and all(
        isinstance(each, tuple | list) and len(each) == 2 for each in got
    )
    expect(good, f"{name} returns a list of pairs; it returned {got}.")
    return got


def rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def same_batches(impl: Any, routes: list[Pairs], num_experts: int, what: str) -> None:
    """Tokens and weights of every expert."""
    before = deepcopy(routes)
    got = accept(impl.dispatch(routes, num_experts), "dispatch returns a list per expert")
    equal(routes, before, "dispatch may not change the routes")
    want = batched(routes, num_experts)
    case = f"{len(routes)} tokens, {num_experts} experts"
    equal(len(got), num_experts, "The number of experts that dispatch returns", case)
    for expert, (mine, right) in enumerate(zip(got, want, strict=True)):
        tokens = [each[0] for each in pairs(mine, "dispatch: each expert")]
        equal(tokens, [each[0] for each in right], what, f"{case}, expert {expert}")
        weights = [each[1] for each in mine]
        close(weights, [each[1] for each in right], "The weights that go with tokens", case)


def same_output(impl: Any, x: Rows, batches: list[Pairs], what: str) -> Experts:
    """The output, and that nothing was changed; returns the experts with their calls."""
    run, rows, given = Experts(), deepcopy(x), deepcopy(batches)
    got = accept(impl.combine(rows, given, run), "combine returns rows")
    case = f"x = {x}, batches = {[[(t, round(w, 3)) for t, w in b] for b in batches]}"
    equal(len(got), len(x), "The number of rows that combine returns", case)
    close(got, layer(x, batches), what, case)
    equal(rows, x, "combine may not change x", case)
    equal(given, batches, "combine may not change the batches", case)
    return run


def scores_of(dice: random.Random, num_experts: int) -> list[float]:
    """Different scores above 0 that do not add up to 1, as a sigmoid gives them."""
    return [dice.uniform(0.05, 0.95) for _ in range(num_experts)]


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Three tokens, four experts, two each."""
    zeros = [0.0] * 4
    for scores in SCORES:
        same_route(impl, scores, zeros, 2, "The experts of a token of the example")
    routes = [routed(scores, zeros, 2) for scores in SCORES]
    same_batches(impl, routes, 4, "The tokens of an expert of the example")
    same_output(impl, X, BATCHES, "The output of the example")


@check(2, "The chosen experts and their weights")
def test_route(impl: Any) -> None:
    """One expert to all of them; ties; scores that do not add up to 1."""
    dice = random.Random(1)
    for num_experts, k in ((4, 1), (4, 2), (8, 3), (5, 5)):
        same_route(impl, scores_of(dice, num_experts), [0.0] * num_experts, k, "The chosen experts")
    for scores in ([0.5, 0.25, 0.5, 0.5], [0.25, 0.25, 0.25, 0.25], [0.1, 0.7, 0.7, 0.7]):
        same_route(impl, scores, [0.0] * 4, 2, "The chosen experts, equal scores")


@check(2, "A bias that changes only the choice")
def test_bias(impl: Any) -> None:
    """A bias that changes the choice, one that changes nothing, and a negative one."""
    for bias in ([0.5, 0.0, 0.0, 0.0], [0.01] * 4, [0.0, -0.6, 0.0, 0.0], [0.1, -0.4, 0.3, 0.0]):
        same_route(impl, SCORES[0], bias, 2, "The chosen experts, with a bias")
        same_route(impl, SCORES[1], bias, 3, "The chosen experts, with a bias")


@check(2, "The tokens of each expert")
def test_dispatch(impl: Any) -> None:
    """Even and uneven choices; experts without a token; one expert that all tokens chose."""
    all_to_one: list[Pairs] = [[(2, 0.5), (token % 2, 0.5)] for token in range(6)]
    same_batches(impl, all_to_one, 5, "The tokens of an expert that all tokens chose")
    dice = random.Random(2)
    for num_tokens, num_experts, k in ((1, 4, 2), (5, 4, 2), (9, 6, 3), (4, 3, 3)):
        routes = [routed(scores_of(dice, num_experts), [0.0] * num_experts, k)
                  for _ in range(num_tokens)]  # fmt: skip
        same_batches(impl, routes, num_experts, "The tokens of an expert")


@check(2, "The output of each token")
def test_combine(impl: Any) -> None:
    """Experts that are not linear, with negative inputs."""
    dice = random.Random(3)
    for num_tokens, num_experts, k in ((1, 4, 2), (4, 4, 1), (5, 4, 2), (6, 5, 4)):
        x, batches = example(dice, num_tokens, num_experts, k)
        same_output(impl, x, batches, "The output of a token")


@check(1, "Some of the experts only")
def test_part(impl: Any) -> None:
    """On a GPU that holds half of the experts the batches of the others are empty."""
    dice = random.Random(4)
    x, batches = example(dice, 6, 4, 2)
    for held in (range(2), range(2, 4), range(0)):
        part = [batch if expert in held else [] for expert, batch in enumerate(batches)]
        same_output(impl, x, part, "The output where some experts are elsewhere")


def example(dice: random.Random, num_tokens: int, num_experts: int, k: int) -> Any:
    """Random rows and the batches of their routes."""
    x = [[float(dice.randint(-6, 6)) for _ in range(2)] for _ in range(num_tokens)]
    bias = [0.0] * num_experts
    routes = [routed(scores_of(dice, num_experts), bias, k) for _ in range(num_tokens)]
    return x, batched(routes, num_experts)


@check(2, "The calls of run, counted")
def test_calls(impl: Any) -> None:
    """One call for each expert that has tokens, with the rows of these tokens."""
    dice = random.Random(5)
    for x, batches in ((X, BATCHES), example(dice, 7, 6, 2), example(dice, 2, 8, 1)):
        run = same_output(impl, x, batches, "The output of a token")
        used = [expert for expert, batch in enumerate(batches) if batch]
        case = f"experts with tokens: {used}"
        equal(sorted(expert for expert, _ in run.calls), used, "The experts that are run", case)
        for expert, rows in sorted(run.calls, key=lambda call: call[0]):
            want = sorted(x[token] for token, _ in batches[expert])
            equal(sorted(rows), want, "The rows that an expert is run with", f"expert {expert}")


@check(1, "Twenty random layers")
def test_random(impl: Any) -> None:
    """From scores to outputs with the submission's own routes and batches."""
    for seed in seeds(20):
        dice = random.Random(seed)
        num_experts, num_tokens = dice.randint(2, 9), dice.randint(1, 8)
        k = dice.randint(1, num_experts)
        scores = [scores_of(dice, num_experts) for _ in range(num_tokens)]
        bias = [dice.uniform(-0.3, 0.3) for _ in range(num_experts)]
        x = [[dice.gauss(0, 3) for _ in range(3)] for _ in range(num_tokens)]
        routes = accept([impl.route(list(each), list(bias), k) for each in scores], "route")
        batches = accept(impl.dispatch(routes, num_experts), "dispatch")
        got = accept(impl.combine(deepcopy(x), batches, Experts()), "combine")
        want = layer(x, batched([routed(each, bias, k) for each in scores], num_experts))
        close(got, want, "A random layer", f"{num_tokens} tokens, {num_experts} experts, k = {k}")
