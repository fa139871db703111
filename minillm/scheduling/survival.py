"""How likely drafts are to be accepted: measured by place, for all requests and for each.

    place                          1      2      3      4
    accepted if those before are  .86    .87    .89    .90     measured, old drafts count less
    survival                      .86    .75    .67    .60     products: place and all before it

A request has few drafts of its own, so its rates are drawn to those of all requests as if these had
given it `WEIGHT` drafts. A place that was hardly tried is drawn to the place before it.
"""

from bisect import bisect_right
from collections.abc import Iterable

WEIGHT = 12.0  # drafts of all requests that count in the rate of one
FIRST_GUESS = 0.6  # of the first place, before anything is measured; it counts as `GUESSED` drafts
GUESSED = 2.0
KEEP_ALL, KEEP_ONE = 0.98, 0.96  # share of the older counts that stays at each draft
LEVELS = (0.9, 0.8, 0.7, 0.55, 0.4, 0.25, 0.12, 0.04)
EXACT = 8  # with more requests than this their curves are not all made anew in each step:
TURNS = 2  # so many are


class Tally:
    """Counts of drafts that were tried and accepted, by place; older ones count less."""

    __slots__ = ("answered", "asked", "hits", "keep", "tries")

    def __init__(self, num_places: int, keep: float):
        self.keep = keep
        self.tries, self.hits = [0.0] * num_places, [0.0] * num_places
        self.asked = self.answered = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A row was verified. What follows a rejected draft was not tried."""
        keep, tries, hits = self.keep, self.tries, self.hits
        self.asked = self.asked * keep + 1
        self.answered = self.answered * keep + (num_drafted > 0)
        for place in range(min(num_accepted + 1, num_drafted, len(tries))):
            tries[place] = tries[place] * keep + 1
            hits[place] = hits[place] * keep + (place < num_accepted)

    def fade(self, share: float) -> None:
        """Trust these counts less."""
        self.tries = [each * share for each in self.tries]
        self.hits = [each * share for each in self.hits]
        self.asked, self.answered = self.asked * share, self.answered * share


class Curve:
    """What one request can expect of drafts.

    Attributes:
        answered: probability that its proposer has any drafts.
        survival: by place, the probability that a draft there is accepted if there are drafts.
        counts, gains: for each of `LEVELS`, the expected drafts and accepted drafts of a step that
            drafts the places whose survival is at least that.
        nums: these places.
    """

    __slots__ = ("answered", "counts", "gains", "nums", "survival")

    def __init__(self, answered: float, rates: Iterable[float]):
        self.answered = answered
        self.survival: list[float] = []
        sums, product = [0.0], 1.0
        for rate in rates:
            product *= rate
            self.survival.append(product)
            sums.append(sums[-1] + product)
        negative = [-each for each in self.survival]
        self.nums = [bisect_right(negative, -level) for level in LEVELS]
        self.counts = [answered * num for num in self.nums]
        self.gains = [answered * sums[num] for num in self.nums]


class Survival:
    """Rates of all requests, and of each by its sequence."""

    def __init__(self, num_places: int):
        self.num_places = num_places
        self.all = Tally(num_places, KEEP_ALL)
        self._own: dict[int, Tally] = {}
        self._curves: dict[int, Curve] = {}
        self._turn = 0

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """A row was verified."""
        self.all.add(num_drafted, num_accepted)
        own = self._own.get(seq_id)
        if own is None:
            own = self._own[seq_id] = Tally(self.num_places, KEEP_ONE)
        own.add(num_drafted, num_accepted)

    def curves(self, seq_ids: list[int]) -> list[Curve]:
        """What each of these sequences can expect."""
        due = len(seq_ids) if len(seq_ids) <= EXACT else TURNS
        rates = self._rates()
        for _ in range(due):
            self._turn = (self._turn + 1) % len(seq_ids)
            seq_id = seq_ids[self._turn]
            self._curves[seq_id] = self._curve(seq_id, *rates)
        found = [self._curves.get(seq_id) for seq_id in seq_ids]
        if None not in found:
            return found  # type: ignore[return-value]
        common = Curve(*rates)
        return [common if curve is None else curve for curve in found]

    def _rates(self) -> tuple[float, list[float]]:
        """Of all requests: how often there are drafts, and the acceptance of each place."""
        before, rates, tally = FIRST_GUESS, [], self.all
        for tries, hits in zip(tally.tries, tally.hits, strict=True):
            before = (hits + GUESSED * before) / (tries + GUESSED)
            rates.append(before)
        return (tally.answered + GUESSED) / (tally.asked + GUESSED), rates

    def _curve(self, seq_id: int, answered: float, rates: list[float]) -> Curve:
        own = self._own.get(seq_id)
        if own is None:
            return Curve(answered, rates)
        answered = (own.answered + WEIGHT * answered) / (own.asked + WEIGHT)
        pairs = zip(own.tries, own.hits, rates, strict=True)
        return Curve(
            answered, [(hits + WEIGHT * rate) / (tries + WEIGHT) for tries, hits, rate in pairs]
        )

    def doubt(self, share: float = 0.25) -> None:
        """What was measured did not hold: let new drafts say more."""
        for tally in (self.all, *self._own.values()):
            tally.fade(share)
        self._curves.clear()

    def keep(self, seq_ids: Iterable[int]) -> None:
        """Forget all other sequences."""
        kept = set(seq_ids)
        self._own = {key: own for key, own in self._own.items() if key in kept}
        self._curves = {key: curve for key, curve in self._curves.items() if key in kept}
