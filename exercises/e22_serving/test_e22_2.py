"""The public checks of e22.2: good requests, searches with wrong runs, prices, choices."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minillm_exercises.checking import CheckFailedError, accept, check, close, equal, expect, seeds

Attained = Callable[[int, int], float]
LIMITS = {"ttft": 0.5, "tpot": 0.1}


@dataclass(frozen=True)
class Configuration:
    """A configuration with the fields of the README."""

    name: str
    rate: int | None
    tokens: int
    gpus: int
    cents: int


OFFERS = [
    Configuration("small", 2, 400, 1, 200),
    Configuration("large", 6, 1500, 2, 250),
    Configuration("fast", 10, 3600, 4, 250),
    Configuration("cheap", None, 900, 1, 90),
]


def took(ttft: float, tpot: float | None = 0.05, e2e: float = 1.0) -> dict[str, float | None]:
    """The measures of a request that succeeded."""
    return {"ttft": ttft, "tpot": tpot, "e2e": e2e}


EXAMPLE = [took(0.5, 0.08), took(0.3, None, 0.3), took(0.2, 0.12), None]


def rated(
    impl: Any, what: str, requests: Sequence[Any], want: Sequence[float],
    limits: Any = None, seconds: float = 2.0,
) -> None:  # fmt: skip
    """These requests have this goodput and attainment."""
    given = [None if each is None else dict(each) for each in requests]
    limits = dict(LIMITS if limits is None else limits)
    case = f"limits {limits}, {seconds:g} seconds, {shown(requests)}"
    close(impl.goodput(given, limits, seconds), want, f"Goodput and attainment, {what}", case)
    equal(given, list(requests), "goodput may not change the requests", case)


def shown(requests: Sequence[Any]) -> str:
    """A few requests as they are, of many the number."""
    return f"requests {list(requests)}" if len(requests) < 6 else f"{len(requests)} requests"


class Runs:
    """A server that is measured: `attained(rate, times)` after so many earlier runs of a rate.

    It counts the runs, and fails as soon as there are more than there may be.
    """

    def __init__(self, rates: Sequence[int], attained: Attained):
        self.rates, self.attained = rates, attained
        self.asked: Counter[int] = Counter()

    def __call__(self, rate: int) -> float:
        """The attainment of one run."""
        if accept(rate, "The rate of a run") not in self.rates:
            raise CheckFailedError(f"run({rate!r}): ask only for rates of the list.")
        times = self.asked[rate]
        self.asked[rate] += 1
        of = f"highest_rate, {len(self.rates)} rates from {self.rates[0]} to {self.rates[-1]}"
        expect(times < 3, f"{of}: a fourth run of the rate {rate}; at most 3 are allowed.", "runs")
        most = len(self.rates).bit_length()
        expect(len(self.asked) <= most, f"{of}: {most + 1} different rates were run; at most "
               f"{most} are allowed, because 2 to the power of {most} is above "
               f"{len(self.rates)}.", "rates")  # fmt: skip
        return self.attained(rate, times)


def server(best: int, share: float, wrong: Callable[[int], int | None], near: float) -> Attained:
    """Rates up to `best` hold: their runs attain `near` more than the share, those of higher rates
    less. `wrong(rate)` is the run of a rate, 0 to 2, that is far off; None if none is."""

    def attained(rate: int, times: int) -> float:
        off = wrong(rate) == times
        if rate <= best:
            return 0.05 if off else min(share + near, 1.0)
        return 1.0 if off else share - near - 0.01

    return attained


def searched(
    impl: Any, what: str, rates: list[int], best: int, wrong: Any = lambda _: None,
    share: float = 0.9, near: float = 0.02,
) -> None:  # fmt: skip
    """The search finds the highest rate that holds, and runs no more than it may."""
    many = f"the {len(rates)} rates {rates[0]} to {rates[-1]}" if len(rates) > 8 else f"{rates}"
    case = f"highest_rate(run, {many}, {share})"
    want = max((rate for rate in rates if rate <= best), default=None)
    given = list(rates)
    got = impl.highest_rate(Runs(rates, server(best, share, wrong, near)), given, share)
    equal(got, want, what, case)
    equal(given, rates, "highest_rate may not change the rates", case)


def chosen(
    impl: Any, what: str, offers: Sequence[Configuration], demand: int, gpus: int, want: Any
) -> None:
    """The choice for a demand."""
    rows = "; ".join(f"{c.name} {c.rate} {c.tokens} {c.gpus} {c.cents}" for c in offers)
    case = f"demand {demand}, at most {gpus} GPUs; name rate tokens gpus cents: {rows}"
    given = list(offers)
    equal(impl.cheapest(given, demand, gpus), want, what, case)
    equal(given == list(offers), True, "cheapest may not change the list", case)


@check(1, "The README's example")
def test_by_hand(impl: Any) -> None:
    """Four requests, a search with two wrong runs, four configurations."""
    rated(impl, "the example", EXAMPLE, (1.0, 0.5))
    given = {4: (0.96, 0.4, 0.95), 6: (0.7, 0.72, 1.0), 5: (0.91, 0.92, 0.9)}
    attained = server(5, 0.9, lambda _: None, 0.02)
    rates = [1, 2, 3, 4, 5, 6, 7]
    run = Runs(rates, lambda rate, times: given[rate][times] if rate in given else
               attained(rate, times))  # fmt: skip
    got = impl.highest_rate(run, list(rates), 0.9)
    equal(got, 5, "The highest rate that holds, of the example")
    wants = (720_000.0, 1_080_000.0, 1_296_000.0, 0)
    for offer, want in zip(OFFERS, wants, strict=True):
        close(impl.tokens_per_dollar(offer), want, "Tokens per dollar of the example", offer.name)
    chosen(impl, "The choice of the example", OFFERS, 5, 8, ("large", 1))
    chosen(impl, "The choice of the example with 1 GPU", OFFERS, 5, 1, None)


@check(2, "Which requests are good")
def test_good(impl: Any) -> None:
    """Borders, single tokens, several limits, failures, nothing."""
    rated(impl, "all far within", [took(0.1)] * 4, (2.0, 1.0))
    rated(impl, "equal to both limits", [took(0.5, 0.1)], (0.5, 1.0))
    rated(impl, "above one limit of two", [took(0.6), took(0.1, 0.2)], (0.0, 0.0))
    halves = [took(0.6), took(0.1, 0.2), took(0.1), took(0.2)]
    rated(impl, "one slow at first, one slow later", halves, (1.0, 0.5))
    rated(impl, "above both limits", [took(0.6, 0.2), took(0.1)], (0.5, 0.5))
    rated(impl, "a single token", [took(0.1, None), took(0.6, None)], (0.5, 0.5))
    late = [took(0.1, 0.05, 9.0), took(0.1, 0.05, 2.0)]
    rated(impl, "a measure without a limit", late, (1.0, 1.0))
    rated(impl, "a limit of e2e alone", late, (0.5, 0.5), {"e2e": 5.0})
    rated(impl, "without limits", [took(9.0), None], (0.5, 0.5), {})
    outlier = [took(0.1)] * 9 + [took(60.0)]
    rated(impl, "one very slow reply of ten", outlier, (0.9, 0.9), seconds=10.0)


@check(2, "Failures, and other lengths")
def test_failures(impl: Any) -> None:
    """Failures and rejections are misses; goodput is per second of the measurement."""
    rated(impl, "half of them failed", [took(0.1), None, None, took(0.2)], (1.0, 0.5))
    rated(impl, "all failed", [None, None], (0.0, 0.0))
    rated(impl, "no requests", [], (0.0, 0.0))
    rated(impl, "eight seconds", [took(0.1), took(0.9), None, took(0.2)], (0.25, 0.5), seconds=8.0)
    for seed in seeds(20):
        draw = random.Random(seed)
        requests = [
            draw.choice([None, took(draw.random(), draw.choice([None, 0.05, 0.1, 0.11]))])
            for _ in range(draw.randint(1, 40))
        ]
        fits = [r for r in requests if r and r["ttft"] <= 0.5 and (r["tpot"] or 0) <= 0.1]
        seconds = draw.randint(1, 50) / 4
        want = len(fits) / seconds, len(fits) / len(requests)
        rated(impl, "random requests", requests, want, seconds=seconds)


@check(2, "The highest rate that holds")
def test_search(impl: Any) -> None:
    """Every place of short lists; none, all, an empty list; exactly the share."""
    what = "The highest rate that holds"
    for size in (1, 2, 3, 5, 8):
        rates = [3 * i + 2 for i in range(size)]
        for best in (*rates, 0):
            searched(impl, what, rates, best)
    searched(impl, f"{what}, of no rates", [], 0)
    searched(impl, f"{what}, with an attainment of exactly the share", [1, 2, 3], 2, near=0.0)
    searched(impl, f"{what}, with a share of a half", [1, 2, 3], 2, share=0.5)


@check(2, "Runs that are wrong")
def test_wrong_runs(impl: Any) -> None:
    """The first, second or third run of some rates is far off."""
    rates = [1, 2, 4, 8, 16, 32, 64]
    names = ("first", "second", "third")
    for place, name in enumerate(names):
        for best in (0, 1, 8, 16, 64):
            what = f"The highest rate that holds, where the {name} run of each rate is far off"
            searched(impl, what, rates, best, lambda _, place=place: place)
    what = "The highest rate that holds, where a single rate has a wrong run"
    for odd in rates:
        searched(impl, what, rates, 16, lambda rate, odd=odd: 0 if rate == odd else None)


@check(2, "Long lists, and how much is run")
def test_long(impl: Any) -> None:
    """Up to a thousand rates; wrong runs at random."""
    searched(impl, "The highest of a thousand rates", list(range(1, 1001)), 637)
    for seed in seeds(40):
        draw = random.Random(seed)
        rates = sorted(draw.sample(range(1, 5000), draw.choice([7, 15, 16, 100, 1000])))
        wrong = {rate: draw.choice([0, 1, 2, None]) for rate in rates}
        best = draw.choice([0, *rates])
        share = draw.choice([0.9, 0.95, 0.99])
        searched(impl, "The highest rate of a random list", rates, best, wrong.get, share)


@check(1, "Tokens per dollar")
def test_dollars(impl: Any) -> None:
    """Cents, GPUs, hours, and what never holds."""
    for tokens, gpus, cents, want in (
        (1000, 1, 100, 3_600_000.0),
        (1000, 1, 250, 1_440_000.0),
        (1000, 8, 250, 180_000.0),
        (7, 2, 99, 7 * 3600 / 1.98),
    ):
        offer = Configuration("x", 5, tokens, gpus, cents)
        case = f"{tokens} tokens/s, {gpus} GPUs at {cents} cents"
        close(impl.tokens_per_dollar(offer), want, "Tokens per dollar", case)
    never = Configuration("x", None, 1000, 1, 100)
    close(impl.tokens_per_dollar(never), 0, "Tokens per dollar where no rate holds")


@check(2, "The cheapest choice")
def test_cheapest(impl: Any) -> None:
    """Whole replicas, the GPUs of all, ties, none."""
    one, two = Configuration("one", 4, 100, 1, 300), Configuration("two", 9, 999, 2, 290)
    chosen(impl, "The demand of exactly one replica", [two, one], 4, 9, ("one", 1))
    chosen(impl, "One request per second more", [one, two], 5, 9, ("two", 1))
    chosen(impl, "The demand of exactly two replicas", [one], 8, 9, ("one", 2))
    chosen(impl, "Two and a bit: three replicas", [one], 9, 3, ("one", 3))
    chosen(impl, "Exactly as many GPUs as there may be", [two], 18, 4, ("two", 2))
    chosen(impl, "One GPU too few for all replicas", [two], 18, 3, None)
    big = Configuration("big", 40, 900, 8, 100)
    chosen(impl, "The cheapest needs too many GPUs", [big, one], 9, 4, ("one", 3))
    wide, slim = Configuration("wide", 5, 10, 4, 150), Configuration("slim", 5, 10, 2, 300)
    chosen(impl, "Equal cost, 4 GPUs or 2", [wide, slim], 5, 8, ("slim", 1))
    half = Configuration("half", 3, 10, 1, 300)
    chosen(impl, "Equal cost, 1 replica of 2 GPUs or 2 of 1", [slim, half], 5, 8, ("slim", 1))
    chosen(impl, "Equal cost, 2 replicas of 1 GPU or 1 of 2", [half, slim], 5, 8, ("half", 2))
    never = Configuration("never", None, 10**6, 1, 1)
    chosen(impl, "A configuration that never holds", [never, one], 3, 9, ("one", 1))
    chosen(impl, "Only configurations that never hold", [never], 1, 9, None)
    chosen(impl, "No configurations", [], 1, 9, None)


@check(1, "Two hundred random choices")
def test_random(impl: Any) -> None:
    """All rules at once, with many ties."""
    for seed in seeds(200):
        draw = random.Random(seed)
        offers = [
            Configuration(name, draw.choice([None, 1, 2, 3, 5, 8, 13]), draw.randint(1, 999),
                          draw.choice([1, 2, 4]), draw.choice([50, 100, 150, 200]))
            for name in "abcdef"[: draw.randint(1, 6)]
        ]  # fmt: skip
        demand, gpus = draw.randint(1, 30), draw.randint(1, 16)
        best: tuple[int, ...] | None = None
        want = None
        for offer in offers:
            replicas = -(-demand // offer.rate) if offer.rate else gpus + 1
            used = replicas * offer.gpus
            if used <= gpus and (best is None or (used * offer.cents, used) < best):
                best, want = (used * offer.cents, used), (offer.name, replicas)
        chosen(impl, "The cheapest of random offers", offers, demand, gpus, want)
