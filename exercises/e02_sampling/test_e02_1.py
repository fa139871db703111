"""The public checks of e02.1: each rule alone, then all together."""

import math
import random
from typing import Any

from minillm_exercises.checking import check, equal, seeds

FORBIDDEN = -math.inf
STEPS = [3.0, 1.0, 2.0, 0.0]  # probabilities 0.64, 0.09, 0.24, 0.03
FAR = 1e-9  # a random case whose sums come nearer to an edge is left out: rounding decides it


def untouched(given: list[float], logits: list[float], case: str) -> None:
    """The caller's list is as it was: asked first, for a changed one explains a wrong result."""
    equal(given, logits, "Your code may not change the list of logits; after the call", case)


def kept(impl: Any, what: str, want: list[int], logits: list[float], *rest: float) -> None:
    """`keep` returns `want` and leaves its argument alone."""
    given = list(logits)
    temperature, top_k, top_p = rest
    case = f"logits={logits}, temperature={temperature}, top_k={top_k}, top_p={top_p}"
    got = impl.keep(given, temperature, top_k, top_p)
    untouched(given, logits, case)
    equal(got, want, what, case)


def chosen(impl: Any, what: str, want: int, logits: list[float], *rest: float) -> None:
    """`choose` returns `want` and leaves its argument alone."""
    given = list(logits)
    temperature, top_k, top_p, u = rest
    case = f"logits={logits}, temperature={temperature}, top_k={top_k}, top_p={top_p}, u={u}"
    got = impl.choose(given, temperature, top_k, top_p, u)
    untouched(given, logits, case)
    equal(got, want, what, case)


@check(1, "The worked example of the README")
def test_by_hand(impl: Any) -> None:
    """Two of three tokens are kept, and each is drawn in its part."""
    kept(impl, "The worked example", [0, 2], [2.0, 0.0, 1.0], 1.0, 0, 0.9)
    chosen(impl, "The worked example, drawn at 0.7", 0, [2.0, 0.0, 1.0], 1.0, 0, 0.9, 0.7)
    chosen(impl, "The worked example, drawn at 0.8", 2, [2.0, 0.0, 1.0], 1.0, 0, 0.9, 0.8)


@check(1, "Ranking, and equal logits")
def test_ranking(impl: Any) -> None:
    """Best first; the smaller id wins a tie, also at the edge of top-k and at temperature 0."""
    kept(impl, "Everything, best first", [0, 2, 1, 3], STEPS, 1.0, 0, 1.0)
    kept(impl, "Two of three equal logits", [1, 2], [1.0, 3.0, 3.0, 3.0], 1.0, 2, 1.0)
    kept(impl, "Temperature 0 with two best tokens", [1], [1.0, 3.0, 3.0], 0.0, 0, 1.0)


@check(2, "Temperatures, also on logits that overflow exp")
def test_temperature(impl: Any) -> None:
    """Low, high and zero; the truncation sees the divided logits."""
    kept(impl, "Temperature 0 with top-k 3 and top-p 1", [0], STEPS, 0.0, 3, 1.0)
    kept(impl, "Top-p 0.9 at temperature 1", [0, 2, 1], STEPS, 1.0, 0, 0.9)
    kept(impl, "Top-p 0.9 at temperature 0.5", [0, 2], STEPS, 0.5, 0, 0.9)
    kept(impl, "Top-p 0.9 at temperature 4", [0, 2, 1, 3], STEPS, 4.0, 0, 0.9)
    kept(impl, "Logits around 1000", [2, 1], [997.0, 1000.0, 1001.0], 1.0, 0, 0.9)
    kept(impl, "A temperature of 0.001", [1], [1.0, 2.0, 1.5], 0.001, 0, 0.99)


@check(1, "Top-k alone")
def test_top_k(impl: Any) -> None:
    """One, some, none asked for, more than there are."""
    for top_k, want in ((1, [0]), (3, [0, 2, 1]), (0, [0, 2, 1, 3]), (4, [0, 2, 1, 3])):
        kept(impl, f"Top-k {top_k} of four", want, STEPS, 1.0, top_k, 1.0)
    kept(impl, "Top-k 9 of four", [0, 2, 1, 3], STEPS, 1.0, 9, 1.0)
    kept(impl, "A vocabulary of one token", [0], [-7.0], 2.0, 5, 0.5)


@check(2, "Top-p alone, also where a sum meets it exactly")
def test_top_p(impl: Any) -> None:
    """The token that crosses is kept; equal is enough; 1 keeps what no float can hold."""
    kept(impl, "Top-p 0.3, when the best token has 0.64", [0], STEPS, 1.0, 0, 0.3)
    kept(impl, "Top-p 0.7: 0.64 is too little, 0.88 enough", [0, 2], STEPS, 1.0, 0, 0.7)
    kept(
        impl, "Top-p 0.5 of four equal tokens: two have it exactly", [0, 1], [0.0] * 4, 1.0, 0, 0.5
    )
    kept(impl, "Top-p 0.6 of four equal tokens", [0, 1, 2], [0.0] * 4, 1.0, 0, 0.6)
    kept(impl, "Top-p 1 with a token of exp(-2000)", [1, 0], [-2000.0, 0.0], 1.0, 0, 1.0)


@check(2, "Top-k, then top-p over the tokens that it kept")
def test_together(impl: Any) -> None:
    """The share is of the tokens that top-k kept: 0.73 and 0.27 instead of 0.64 and 0.24."""
    kept(impl, "Top-k 2, then top-p 0.7", [0], STEPS, 1.0, 2, 0.7)
    kept(impl, "Top-k 2, then top-p 0.8", [0, 2], STEPS, 1.0, 2, 0.8)
    kept(impl, "Top-k 3 of six equal tokens, then top-p 0.5", [0, 1], [5.0] * 6, 1.0, 3, 0.5)
    kept(impl, "Temperature 3, top-k 3, top-p 0.8", [0, 2, 1], STEPS, 3.0, 3, 0.8)


@check(2, "The draw, from end to end")
def test_draw(impl: Any) -> None:
    """A token's part begins where the one before it ends."""
    for u, want in ((0.0, 0), (0.24, 0), (0.25, 1), (0.49, 1), (0.5, 2), (0.75, 3), (0.999999, 3)):
        chosen(impl, "One of four equal tokens", want, [0.0] * 4, 1.0, 0, 1.0, u)
    chosen(impl, "Top-k 2, below the border at 0.731", 0, STEPS, 1.0, 2, 1.0, 0.72)
    chosen(impl, "Top-k 2, above the border at 0.731", 2, STEPS, 1.0, 2, 1.0, 0.74)
    chosen(impl, "Top-p 0.85, near the end", 2, STEPS, 1.0, 0, 0.85, 0.97)
    chosen(impl, "Temperature 2, above the border at 0.455", 2, STEPS, 2.0, 0, 1.0, 0.48)
    chosen(impl, "Temperature 0", 0, STEPS, 0.0, 0, 1.0, 0.9)
    chosen(impl, "The largest u below 1, seven equal tokens", 6, [1.0] * 7, 1.0, 0, 1.0, 1 - 2**-53)


@check(1, "Forbidden tokens")
def test_forbidden(impl: Any) -> None:
    """Never kept, whatever there is room for."""
    masked = [FORBIDDEN, 1.0, FORBIDDEN, 2.0]
    kept(impl, "Two of four tokens forbidden, no limits", [3, 1], masked, 1.0, 0, 1.0)
    kept(impl, "Two of four tokens forbidden, top-k 3", [3, 1], masked, 1.0, 3, 1.0)
    kept(impl, "Two of four tokens forbidden, temperature 0", [3], masked, 0.0, 0, 1.0)
    chosen(impl, "Two of four tokens forbidden", 1, masked, 1.0, 0, 1.0, 0.999)


@check(2, "Twenty random lists")
def test_everything(impl: Any) -> None:
    """Lists with ties and forbidden tokens, every filter at once, then a draw."""
    for seed in seeds(20):
        draw = random.Random(seed)
        logits = [round(draw.gauss(0, 3), 1) for _ in range(draw.randint(1, 40))]
        logits += [FORBIDDEN] * draw.randint(0, 2)
        temperature = draw.choice((0.3, 0.7, 1.0, 1.6))
        top_k = draw.choice((0, 1, 5, 20, 100))
        top_p, u = draw.uniform(0.05, 0.99), draw.random()
        ids, border = reference(logits, temperature, top_k, top_p, u)
        if border > FAR:
            rest = (temperature, top_k, top_p)
            kept(impl, "A random list", ids, logits, *rest)
            token = walk(logits, ids, temperature, u)
            chosen(impl, "A draw from a random list", token, logits, *rest, u)


def reference(
    logits: list[float], temperature: float, top_k: int, top_p: float, u: float
) -> tuple[list[int], float]:
    """What is kept, and how near a running sum comes to `top_p` or `u`."""
    ranking = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    ranking = [token for token in ranking if logits[token] > FORBIDDEN][: top_k or None]
    sums = running(logits, ranking, temperature)
    ids = ranking[: 1 + sum(total < top_p for total in sums[:-1])]
    shares = running(logits, ids, temperature)[:-1]
    return ids, min([1.0, *(abs(s - top_p) for s in sums), *(abs(s - u) for s in shares)])


def running(logits: list[float], ids: list[int], temperature: float) -> list[float]:
    """Running sums of the probability that `ids` share."""
    weights = [math.exp((logits[token] - logits[ids[0]]) / temperature) for token in ids]
    return [math.fsum(weights[: at + 1]) / math.fsum(weights) for at in range(len(ids))]


def walk(logits: list[float], ids: list[int], temperature: float, u: float) -> int:
    """The id in whose part `u` lies."""
    sums = running(logits, ids, temperature)
    return ids[sum(total <= u for total in sums[:-1])]
