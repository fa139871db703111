"""The public checks of e16.1: the two formulas, single steps, then the exact distribution of the
tokens."""

import marshal
import random
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import product
from typing import Any

from minillm_exercises.checking import accept, check, close, equal, expect, seeds

P, Q = [0.125, 0.5, 0.375], [0.5, 0.25, 0.25]  # kept: a quarter of token 0; left over: 0, 2/3, 1/3
NEXT = [[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.375, 0.5, 0.125]]  # the large model after each
DRAFT = [[0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]]  # the small one
LAST = [0.125, 0.25, 0.625]  # the large model after two drafts
COINS, DRAWS = 8, 48  # every border below is a multiple of 1/8, or of 1/48 for the draw
FAR = 1e-9  # a random case in which a coin or u comes nearer to a border is left out


def stepped(impl: Any, *given: Any) -> list[int]:
    """The tokens of one step; what was given must be as it was."""
    targets, dists, drafts, coins, u = given
    copies = [list(map(list, targets)), list(map(list, dists)), list(drafts), list(coins)]
    what = f"drafts={drafts}, coins={coins}, u={u}"
    before = marshalled(copies)
    got = accept(impl.verify(*copies, u), "verify returns a list of tokens", what)
    if marshalled(copies) != before:  # far faster than `equal`, for thousands of steps
        equal(copies, [targets, dists, drafts, coins], "verify may not change its arguments", what)
    return got


def marshalled(values: list[Any]) -> bytes:
    """Nested lists of plain numbers as bytes; none if there is anything else in them."""
    try:
        return marshal.dumps(values, 2)  # later versions note which lists are shared
    except ValueError:
        return b""


def step(impl: Any, what: str, want: list[int], *given: Any) -> None:
    """One step has these tokens."""
    _, _, drafts, coins, u = given
    equal(stepped(impl, *given), want, what, f"drafts={drafts}, coins={coins}, u={u}")


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """One draft, kept and rejected."""
    close(impl.accept_probability(P, Q, 0), 0.25, "The draft 0 is kept with probability")
    close(impl.residual(P, Q), [0.0, 2 / 3, 1 / 3], "The residual of the example")
    chain = [P, NEXT[0]], [Q], [0]
    step(impl, "The example with a coin that keeps the draft", [0, 1], *chain, [0.2], 0.6)
    step(impl, "The example with a coin that rejects it", [1], *chain, [0.3], 0.6)
    step(impl, "The example, rejected, with a larger u", [2], *chain, [0.3], 0.7)


@check(1, "The probability of keeping a draft")
def test_accept(impl: Any) -> None:
    """Never above 1, exactly 1 for equal distributions however rare the token, 0 where p is 0."""
    ask = impl.accept_probability
    close(ask(P, Q, 1), 1.0, "A draft that the large model likes better is kept with probability")
    rare = [1e-7, 1 - 1e-7]
    close(ask(rare, rare, 0), 1.0, "A draft of a model that is the large one itself, q = 1e-7",
          rtol=0, atol=1e-12)  # fmt: skip
    close(ask([3e-8, 1.0], [4e-8, 1.0], 0), 0.75, "A draft of p = 3e-8 and q = 4e-8", atol=1e-9)
    close(ask([0.0, 1.0], [0.5, 0.5], 0), 0.0, "A draft that the large model never writes")


@check(1, "The residual")
def test_residual(impl: Any) -> None:
    """It sums to 1, is 0 where q has more, and is p where nothing is left."""
    p, q = [0.0, 0.7, 0.1, 0.2], [0.4, 0.3, 0.3, 0.0]
    given = list(p), list(q)
    close(impl.residual(*given), [0.0, 2 / 3, 0.0, 1 / 3], "The residual", f"p={p}, q={q}")
    equal(given, (p, q), "residual may not change its arguments")
    same = [0.25, 0.75]
    close(impl.residual([*same], [*same]), same, "Nothing is left of equal distributions")


@check(2, "The end of a chain of drafts")
def test_chain(impl: Any) -> None:
    """Rejected at each place, or nowhere; no draft behind a rejected one comes back."""
    sure = [[0.5, 0.5, 0.0]] * 3
    targets, dists = [*sure, [0.0, 0.0, 1.0]], [[1.0, 0.0, 0.0]] * 3  # kept by half; left: token 1
    chain = targets, dists, [0, 0, 0]
    step(impl, "All three drafts are kept, then one more", [0, 0, 0, 2], *chain, [0.1] * 3, 0.5)
    step(impl, "The third draft is rejected", [0, 0, 1], *chain, [0.1, 0.1, 0.9], 0.5)
    step(impl, "The second of three is rejected", [0, 1], *chain, [0.1, 0.9, 0.1], 0.5)
    step(impl, "The first of three is rejected", [1], *chain, [0.9, 0.1, 0.1], 0.5)
    step(impl, "A step without drafts", [1], [P], [], [], [], 0.3)


@check(1, "Coins and draws at their borders")
def test_borders(impl: Any) -> None:
    """A coin of 0 keeps nothing that is impossible; u at a border belongs to the next token."""
    never = [[0.0, 1.0], [1.0, 0.0]], [[0.5, 0.5]], [0]
    step(impl, "A draft of p = 0, and the coin 0", [1], *never, [0.0], 0.5)
    half = [[0.5, 0.5], [1.0, 0.0]], [[1.0, 0.0]], [0]
    step(impl, "A coin equal to the probability rejects", [1], *half, [0.5], 0.5)
    step(impl, "u = 0.5 at the border of two tokens", [1], [[0.5, 0.5]], [], [], [], 0.5)
    short = [[0.25, 0.25, 0.25, 0.0]]
    step(impl, "Rounding: u above the whole sum, 0.75", [2], short, [], [], [], 0.9)


@check(2, "The exact distribution of the first token")
def test_dist(impl: Any) -> None:
    """One draft of every kind, every coin, every draw: the tokens must have the distribution P."""
    dist = [Fraction(0)] * len(P)
    for token, coin, u in product(range(len(P)), halves(COINS), halves(DRAWS)):
        got = stepped(impl, [P, NEXT[token]], [Q], [token], [coin], u)
        expect(got and got[0] in range(len(P)), f"verify returned {got}: the first token is 0 to 2")
        dist[got[0]] += Fraction(Q[token]) / (COINS * DRAWS)
    close([float(each) for each in dist], P, "The distribution of the first token, over "
          "drafts drawn from q, all coins and all u", f"p={P}, q={Q}")  # fmt: skip


@check(2, "The exact distribution of two tokens")
def test_pairs(impl: Any) -> None:
    """Two drafts, distributions that depend on the first; a step that yields one token is
    completed."""
    seen: Counter[tuple[Any, ...]] = Counter()  # steps by their drafts and first two tokens
    coins = list(halves(COINS))
    for (a, b), (one, two), u in product(
        product(range(3), repeat=2), product(coins, repeat=2), halves(DRAWS // 2)
    ):
        got = stepped(impl, [P, NEXT[a], LAST], [Q, DRAFT[a]], [a, b], [one, two], u)
        expect(0 < len(got) < 4, f"verify returned {got} for 2 drafts: 1 to 3 tokens")
        expect(set(got) <= {0, 1, 2}, f"verify returned {got}: tokens are 0 to 2")
        seen[a, b, *got[:2]] += 1
    pairs: dict[tuple[int, int], Fraction] = defaultdict(Fraction)
    for (a, b, first, *second), times in seen.items():
        weight = times * Fraction(Q[a]) * Fraction(DRAFT[a][b]) / (COINS**2 * DRAWS // 2)
        for token, dist in enumerate(NEXT[first]):
            share = Fraction(dist) if not second else Fraction(int(token == second[0]))
            pairs[first, token] += weight * share
    found = [[float(pairs[a, b]) for b in range(3)] for a in range(3)]
    want = [[P[a] * NEXT[a][b] for b in range(3)] for a in range(3)]
    close(found, want, "The distribution of the first two tokens, over all drafts, coins and u")


@check(1, "Twenty random chains")
def test_random(impl: Any) -> None:
    """Longer chains over a larger vocabulary."""
    for seed in seeds(20):
        dice = random.Random(seed)
        size, k = dice.randint(2, 9), dice.randint(1, 6)
        targets = [shares(dice, size) for _ in range(k + 1)]
        near = [[(a + 0.2) / (1 + 0.2 * size) for a in dist] for dist in targets[:k]]
        drafts = [dice.choices(range(size), dist)[0] for dist in near]
        coins, u = [dice.random() for _ in drafts], dice.random()
        want, border = reference(targets, near, drafts, coins, u)
        if border > FAR:
            step(impl, "A random chain", want, targets, near, drafts, coins, u)


def halves(count: int) -> list[float]:
    """The middles of so many equal parts of 0 to 1."""
    return [(2 * each + 1) / (2 * count) for each in range(count)]


def shares(dice: random.Random, size: int) -> list[float]:
    """A random distribution with some zeros."""
    weights = [dice.choice((0.0, dice.random(), 3 * dice.random())) for _ in range(size)]
    weights[dice.randrange(size)] += 0.1
    return [each / sum(weights) for each in weights]


def reference(
    targets: list[list[float]], dists: list[list[float]], drafts: list[int], coins: list[float],
    u: float,
) -> tuple[list[int], float]:  # fmt: skip
    """The tokens, and how near a coin or u comes to a border."""
    border, kept, dist = 1.0, [], targets[-1]
    for target, other, token, coin in zip(targets[:-1], dists, drafts, coins, strict=True):
        border = min(border, abs(coin - target[token] / other[token]))
        if coin * other[token] >= target[token]:
            more = [max(a - b, 0.0) for a, b in zip(target, other, strict=True)]
            dist = [each / sum(more) for each in more]
            break
        kept.append(token)
    sums = [sum(dist[: token + 1]) for token in range(len(dist))]
    border = min([border, *(abs(total - u) for total in sums[:-1])])
    return [*kept, next((t for t, total in enumerate(sums) if total > u), len(dist) - 1)], border
