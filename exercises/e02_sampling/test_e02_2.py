"""The public checks of e02.2: the entropy, then who is kept and who is not."""

import math
import random
from itertools import pairwise
from typing import Any

from minillm_exercises.checking import check, close, equal, seeds

FORBIDDEN = -math.inf
TABLE = [math.log(4), math.log(2), 0.0, 0.0]  # probabilities 0.5, 0.25, 0.125, 0.125
CROWD = [3.0] + [0.0] * 30  # one token of 0.40 and thirty of 0.02
FAR = 1e-9  # a random case in which two numbers come nearer is left out: rounding decides it


def untouched(given: list[float], logits: list[float], case: str) -> None:
    """The caller's list is as it was: asked first, for a changed one explains a wrong result."""
    equal(given, logits, "Your code may not change the list of logits; after the call", case)


def kept(impl: Any, what: str, want: list[int], logits: list[float], mass: float) -> None:
    """`typical` returns `want` and leaves its argument alone."""
    given, case = list(logits), f"logits={shown(logits)}, mass={mass}"
    got = impl.typical(given, mass)
    untouched(given, logits, case)
    equal(got, want, what, case)


def spread(impl: Any, what: str, want: float, logits: list[float]) -> None:
    """`entropy` returns `want` and leaves its argument alone."""
    given, case = list(logits), f"logits={shown(logits)}"
    got = impl.entropy(given)
    untouched(given, logits, case)
    close(got, want, what, case)


def shown(logits: list[float]) -> str:
    """A list of logits in a few words."""
    return "[3.0] + [0.0] * 30" if logits == CROWD else str([round(x, 3) for x in logits])


@check(1, "The entropy of the README's table, and of equal tokens")
def test_entropy(impl: Any) -> None:
    """Exact values: 1.75 ln 2; ln n for n equal tokens."""
    spread(impl, "The entropy of the table, in nats", 1.75 * math.log(2), TABLE)
    spread(impl, "The entropy of five equal tokens, in nats", math.log(5), [7.0] * 5)
    spread(impl, "The entropy of a single token", 0.0, [2.5])


@check(1, "The entropy of large logits and of forbidden tokens")
def test_entropy_edges(impl: Any) -> None:
    """exp(1000) overflows, and ln 0 does not exist."""
    spread(impl, "The entropy of logits of 1000", math.log(2), [1000.0, 1000.0])
    masked = [0.0, FORBIDDEN, 0.0, 0.0]
    spread(impl, "The entropy of three tokens and a forbidden one", math.log(3), masked)


@check(2, "The README's table")
def test_table(impl: Any) -> None:
    """Token 1 is nearest, then token 0, then the two rare ones, the smaller id first."""
    for mass, want in ((0.2, [1]), (0.6, [0, 1]), (0.8, [0, 1, 2]), (0.95, [0, 1, 2, 3])):
        kept(impl, f"The table with a mass of {mass}", want, TABLE, mass)


@check(2, "Rejected tokens: too predictable and too surprising ones")
def test_rejected(impl: Any) -> None:
    """Among thirty equal tokens the one that stands out is the odd one."""
    crowd = list(range(1, 31))
    kept(impl, "Half of the probability lies with the thirty", crowd[:26], CROWD, 0.51)
    kept(impl, "Beyond the thirty the best one comes in", [0, *crowd], CROWD, 0.7)
    outlier = [1.0, -9.0, 1.5, 0.5]
    kept(impl, "A very surprising token comes last", [0, 2, 3], outlier, 0.99)
    kept(impl, "Nearest first: 0.31, then 0.51", [0, 2], outlier, 0.6)


@check(1, "Sums that meet the mass exactly")
def test_edge(impl: Any) -> None:
    """The token that reaches it is kept, equal is enough; 1 keeps what no float can hold."""
    quarters = [0.0] * 4  # 1 / 4, and exp(-ln 4), are exactly 0.25 in floats
    kept(impl, "Four equal tokens: two have the mass of 0.5 exactly", [0, 1], quarters, 0.5)
    kept(impl, "Four equal tokens: one has the mass of 0.25 exactly", [0], quarters, 0.25)
    kept(impl, "Four equal tokens, a mass of 0.4", [0, 1], [2.0] * 4, 0.4)
    kept(impl, "Four equal tokens, a mass of 0.6", [0, 1, 2], [2.0] * 4, 0.6)
    kept(impl, "A single token", [0], [-3.0], 0.1)
    kept(impl, "A mass of 1 with a token of exp(-2000)", [0, 1, 2], [0.0, -2000.0, 1.0], 1.0)


@check(1, "Forbidden tokens")
def test_forbidden(impl: Any) -> None:
    """Never kept, and no reason to fail."""
    masked = [FORBIDDEN, 1.0, 3.0, FORBIDDEN, 2.0]
    kept(impl, "Two of five tokens forbidden, a mass of 1", [1, 2, 4], masked, 1.0)
    kept(impl, "Two of five tokens forbidden, a mass of 0.8", [2, 4], masked, 0.8)


@check(2, "Twenty random lists")
def test_everything(impl: Any) -> None:
    """Lists with ties and forbidden tokens."""
    for seed in seeds(20):
        draw = random.Random(seed)
        logits = [round(draw.gauss(0, 2), 1) for _ in range(draw.randint(1, 40))]
        logits += [FORBIDDEN] * draw.randint(0, 2)
        mass = draw.uniform(0.05, 0.98)
        want, entropy, border = reference(logits, mass)
        spread(impl, "The entropy of a random list", entropy, logits)
        if border > FAR:
            kept(impl, "A random list", want, logits, mass)


def reference(logits: list[float], mass: float) -> tuple[list[int], float, float]:
    """What is kept, the entropy, and how near two distances, or a sum and `mass`, come."""
    best = max(logits)
    total = math.fsum(math.exp(logit - best) for logit in logits)
    allowed = [token for token, logit in enumerate(logits) if logit > FORBIDDEN]
    surprise = {token: math.log(total) + best - logits[token] for token in allowed}
    entropy = math.fsum(math.exp(-s) * s for s in surprise.values())
    order = sorted(allowed, key=lambda token: (abs(surprise[token] - entropy), token))
    sums = [math.fsum(math.exp(-surprise[t]) for t in order[: n + 1]) for n in range(len(order))]
    ids = order[: 1 + sum(reached < mass for reached in sums[:-1])]
    distances = sorted({logits[token]: abs(s - entropy) for token, s in surprise.items()}.values())
    gaps = [b - a for a, b in pairwise(distances)]
    return sorted(ids), entropy, min([1.0, *gaps, *(abs(s - mass) for s in sums)])
