"""Acceptance probabilities of drafted tokens by draft position, overall and per sequence.

    draft position                 1      2      3      4
    acceptance rate               .86    .87    .89    .90     given that all before are accepted
    survival                      .86    .75    .67    .60     product of the rates up to here

Rates are measured, and older drafts weigh less. A sequence has few drafts of its own, so its rates
are averaged with those of all sequences, which weigh as much as `SHARED_WEIGHT` drafts. In the same
way the rate of a position with few samples is averaged with that of the position before it.
"""

from bisect import bisect_right
from collections.abc import Iterable

SHARED_WEIGHT = 12.0  # drafts; weight of the overall rate in that of one sequence
PRIOR_RATE = 0.6  # acceptance rate of position 1 before any measurement
PRIOR_WEIGHT = 2.0  # drafts; weight of `PRIOR_RATE`, or of the position before
KEEP_ALL, KEEP_ONE = 0.98, 0.96  # decay of the counts per draft: overall, and per sequence
LEVELS = (0.9, 0.8, 0.7, 0.55, 0.4, 0.25, 0.12, 0.04)  # thresholds for survival
MAX_EXACT = 8  # with more sequences only CURVES_PER_STEP curves are updated per step
CURVES_PER_STEP = 2


class Tally:
    """Decaying counts by draft position: `tries` (verified drafts) and `hits` (accepted ones).

    `asked` counts rows for which the proposer was called; `answered` those that got drafts.
    """

    __slots__ = ("answered", "asked", "hits", "keep", "tries")

    def __init__(self, num_places: int, keep: float):
        self.keep = keep
        self.tries, self.hits = [0.0] * num_places, [0.0] * num_places
        self.asked = self.answered = 0.0

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """Add a verified row. Drafts behind a rejected one do not count as tried."""
        keep, tries, hits = self.keep, self.tries, self.hits
        self.asked = self.asked * keep + 1
        self.answered = self.answered * keep + (num_drafted > 0)
        for place in range(min(num_accepted + 1, num_drafted, len(tries))):
            tries[place] = tries[place] * keep + 1
            hits[place] = hits[place] * keep + (place < num_accepted)

    def fade(self, share: float) -> None:
        """Multiply all counts by `share`, so that new samples weigh more."""
        self.tries = [each * share for each in self.tries]
        self.hits = [each * share for each in self.hits]
        self.asked, self.answered = self.asked * share, self.answered * share


class Curve:
    """Predictions for one sequence.

    Attributes:
        answered: probability that the proposer finds any drafts.
        survival: probability that the draft is accepted, by position, if there are drafts.
        nums: for each of `LEVELS`, the number of positions whose survival reaches this level.
        counts, gains: for each of `LEVELS`, the expected number of drafts, and of accepted drafts,
            if these positions are drafted.
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
    """Acceptance rates of all sequences together, and of each."""

    def __init__(self, num_places: int):
        self.num_places = num_places
        self.all = Tally(num_places, KEEP_ALL)
        self._own: dict[int, Tally] = {}
        self._curves: dict[int, Curve] = {}
        self._turn = 0

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Add a verified row."""
        self.all.add(num_drafted, num_accepted)
        own = self._own.get(seq_id)
        if own is None:
            own = self._own[seq_id] = Tally(self.num_places, KEEP_ONE)
        own.add(num_drafted, num_accepted)

    def curves(self, seq_ids: list[int]) -> list[Curve]:
        """Predictions for each of these sequences."""
        due = len(seq_ids) if len(seq_ids) <= MAX_EXACT else CURVES_PER_STEP
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
        """Overall: how often the proposer finds drafts, and the acceptance rate by position."""
        before, rates, tally = PRIOR_RATE, [], self.all
        for tries, hits in zip(tally.tries, tally.hits, strict=True):
            before = (hits + PRIOR_WEIGHT * before) / (tries + PRIOR_WEIGHT)
            rates.append(before)
        return (tally.answered + PRIOR_WEIGHT) / (tally.asked + PRIOR_WEIGHT), rates

    def _curve(self, seq_id: int, answered: float, rates: list[float]) -> Curve:
        own = self._own.get(seq_id)
        if own is None:
            return Curve(answered, rates)
        answered = (own.answered + SHARED_WEIGHT * answered) / (own.asked + SHARED_WEIGHT)
        pairs = zip(own.tries, own.hits, rates, strict=True)
        return Curve(
            answered,
            [
                (hits + SHARED_WEIGHT * rate) / (tries + SHARED_WEIGHT)
                for tries, hits, rate in pairs
            ],
        )

    def discount(self, share: float = 0.25) -> None:
        """Reduce the weight of all measurements, because they predicted wrongly."""
        for tally in (self.all, *self._own.values()):
            tally.fade(share)
        self._curves.clear()

    def keep(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of all other sequences."""
        kept = set(seq_ids)
        self._own = {key: own for key, own in self._own.items() if key in kept}
        self._curves = {key: curve for key, curve in self._curves.items() if key in kept}
