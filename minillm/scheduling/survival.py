"""Probabilities that drafted tokens are accepted, overall and per sequence.

    draft                       1      2      3      4
    survival in a chain       .86    .74    .64    .55     a rate, to the power of the position
    survival in a tree        .50    .13    .12    .07     value of a draft, times a factor

Both are measured. The rate is accepted drafts over tried ones; drafts behind a rejected one are not
tried. The falling values of a tree's drafts are the probabilities that their paths are accepted,
measured when the tree was made; its factor is accepted drafts over those that the values predict.

Older rows weigh less. A sequence has few drafts of its own, so its rate is averaged with that of
all sequences, which weighs as much as `SHARED_WEIGHT` drafts.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

SHARED_WEIGHT = 8.0  # drafts; weight of the overall rate in that of one sequence
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 2.0  # of a chain before any measurement; drafts
TREE_WEIGHT = 4.0  # drafts; weight of the values of a tree
KEEP_ALL, KEEP_ONE = 0.98, 0.96  # decay of the counts per row: overall, and per sequence
LEVELS = (0.9, 0.8, 0.7, 0.55, 0.4, 0.25, 0.12, 0.04)  # thresholds for survival
MAX_EXACT = 8  # with more sequences only CURVES_PER_STEP curves are updated per step
CURVES_PER_STEP = 2


class Rate:
    """Decaying counts: `hits` (accepted drafts) of `tries`, and how often the proposer `answered`
    when it was `asked`."""

    __slots__ = ("answered", "asked", "hits", "keep", "tries")

    def __init__(self, keep: float):
        self.keep = keep
        self.hits = self.tries = self.answered = self.asked = 0.0

    def add(self, hits: int, tries: float, answered: bool) -> None:
        """Add a verified row."""
        keep = self.keep
        self.hits, self.tries = self.hits * keep + hits, self.tries * keep + tries
        self.answered, self.asked = self.answered * keep + answered, self.asked * keep + 1


class Curve:
    """Predictions for one sequence.

    Attributes:
        answered: probability that the proposer finds any drafts.
        survival: probability that the draft is accepted, by draft, if there are drafts.
        nums: for each of `LEVELS`, the number of drafts whose survival reaches this level.
        counts, gains: for each of `LEVELS`, the expected number of drafts, and of accepted drafts,
            if these are drafted.
    """

    __slots__ = ("answered", "counts", "gains", "nums", "survival")

    def __init__(self, answered: float, survival: Sequence[float]):
        self.answered, self.survival = answered, survival
        sums = list(accumulate(survival, initial=0.0))
        negative = [-probability for probability in survival]
        self.nums = [bisect_right(negative, -level) for level in LEVELS]
        self.counts = [answered * num for num in self.nums]
        self.gains = [answered * sums[num] for num in self.nums]


class Survival:
    """The survival of `num_drafts` drafts, of all sequences together and of each; of a chain, or of
    a tree with these values."""

    def __init__(self, num_drafts: int, values: Sequence[float] = ()):
        self.num_drafts, self.values = num_drafts, values
        self.prior = (1.0, TREE_WEIGHT) if values else (PRIOR_RATE, PRIOR_WEIGHT)
        self.all = Rate(KEEP_ALL)
        self._own: dict[int, Rate] = {}
        self._curves: dict[int, Curve] = {}
        self._turn = 0

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Add a verified row."""
        tries: float = min(num_accepted + 1, num_drafted)
        if self.values:
            tries = sum(self.values[:num_drafted])
        for rate in (self.all, self._own.setdefault(seq_id, Rate(KEEP_ONE))):
            rate.add(num_accepted, tries, num_drafted > 0)

    def curves(self, seq_ids: list[int]) -> list[Curve]:
        """Predictions for each of these sequences."""
        due = len(seq_ids) if len(seq_ids) <= MAX_EXACT else CURVES_PER_STEP
        rate, weight = self.prior
        shared = mean(self.all, rate, 1.0, weight)
        for _ in range(due):
            self._turn = (self._turn + 1) % len(seq_ids)
            seq_id = seq_ids[self._turn]
            own = self._own.get(seq_id)
            self._curves[seq_id] = self._curve(*shared, own)
        common = self._curve(*shared)
        return [self._curves.get(seq_id, common) for seq_id in seq_ids]

    def _curve(self, rate: float, answered: float, own: Rate | None = None) -> Curve:
        """The curve of a sequence with its `own` rate, from those of all sequences."""
        if own is not None:
            # Drafts of a tree count by their values, so the weight is that of the best one.
            weight = SHARED_WEIGHT * (self.values[0] if self.values else 1.0)
            rate, answered = mean(own, rate, answered, weight or 1.0)
        if self.values:
            return Curve(answered, [min(1.0, rate * value) for value in self.values])
        return Curve(answered, [rate**place for place in range(1, self.num_drafts + 1)])

    def keep(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of all other sequences."""
        kept = set(seq_ids)
        self._own = {key: own for key, own in self._own.items() if key in kept}
        self._curves = {key: curve for key, curve in self._curves.items() if key in kept}


def mean(rate: Rate, prior: float, answered: float, weight: float) -> tuple[float, float]:
    """The measured rate and how often there are drafts, averaged with others of this weight."""
    return (
        (rate.hits + weight * prior) / (rate.tries + weight),
        (rate.answered + weight * answered) / (rate.asked + weight),
    )
