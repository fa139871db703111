"""The number of drafts of a token tree, of which `AdaptiveDrafts` takes the first ones that pay.

    draft                 1     2     3     4      by falling value, parents before children
    value               .42   .11   .10   .06      probability that its path is accepted, measured
    survival            .50   .13   .12   .07      when the tree was made, times a measured factor

Each value is the probability of one more token, so the values take the place of the survival of a
chain's positions. What is measured while the engine runs is one factor: accepted drafts over those
that the values predict, of all sequences and of each.
"""

from collections.abc import Iterable, Sequence

from minillm.scheduling.adaptive_drafts import AdaptiveDrafts
from minillm.scheduling.survival import KEEP_ALL, KEEP_ONE, SHARED_WEIGHT, Curve, Survival

INITIAL_WEIGHT = 4.0  # drafts; weight of the values themselves


class Factor:
    """Accepted drafts over predicted ones, with decay."""

    __slots__ = ("accepted", "expected", "keep")

    def __init__(self, weight: float, keep: float):
        self.accepted = self.expected = weight
        self.keep = keep

    def add(self, expected: float, accepted: int) -> None:
        """Add a verified row."""
        self.accepted = self.accepted * self.keep + accepted
        self.expected = self.expected * self.keep + expected


class TreeSurvival(Survival):
    """Survival of the drafts of a tree with these values, which fall."""

    def __init__(self, values: Sequence[float]):
        super().__init__(len(values))
        self.values = tuple(values)
        self._factor, self._factors = Factor(INITIAL_WEIGHT, KEEP_ALL), dict[int, Factor]()

    def observe(self, seq_id: int, num_drafted: int, num_accepted: int) -> None:
        """Add a verified row."""
        expected = sum(self.values[:num_drafted])
        own = self._factors.setdefault(seq_id, Factor(0.0, KEEP_ONE))
        for factor in (self._factor, own):
            factor.add(expected, num_accepted)

    def curves(self, seq_ids: list[int]) -> list[Curve]:
        """Predictions for each of these sequences."""
        shared, none = self._factor.accepted / self._factor.expected, Factor(0.0, KEEP_ONE)
        weight = SHARED_WEIGHT * self.values[0] or 1.0  # of values that are all 0
        found = []
        for seq_id in seq_ids:
            own = self._factors.get(seq_id, none)
            factor = (own.accepted + weight * shared) / (own.expected + weight)
            survival = [min(1.0, factor * value) for value in self.values]
            before = [1.0, *survival[:-1]]
            rates = [b / a if a else 0.0 for a, b in zip(before, survival, strict=True)]
            found.append(Curve(1.0, rates))
        return found

    def discount(self, share: float = 0.25) -> None:
        """Reduce the weight of all measurements, because they predicted wrongly."""
        for factor in (self._factor, *self._factors.values()):
            factor.accepted, factor.expected = factor.accepted * share, factor.expected * share

    def keep(self, seq_ids: Iterable[int]) -> None:
        """Drop the state of all other sequences."""
        kept = set(seq_ids)
        self._factors = {key: one for key, one in self._factors.items() if key in kept}


class TreeDrafts(AdaptiveDrafts):
    """`AdaptiveDrafts` for a tree whose drafts have these values."""

    def __init__(self, values: Sequence[float], max_num_seqs: int | None = None):
        super().__init__(len(values), max_num_seqs)
        self.acceptance = TreeSurvival(values)
