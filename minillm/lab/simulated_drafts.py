"""Drafts without a model: how many of a row are accepted is drawn from a table.

    survival   0.8    0.6    0.5        at least one, two, three drafts are accepted
    draw       0.55   0.55   -          one uniform number per row: two are accepted here

A simulation decides what the scheduler would with this acceptance. Whether a real proposer reaches
it is another question: measure it, and call what follows from a table simulated.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

from minillm.api.sampling_params import shown
from minillm.errors import ConfigError
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.request import Sequence as ScheduledSequence


@dataclass(frozen=True)
class SimulatedDrafts:
    """What `Simulation(speculation=...)` drafts.

    Attributes:
        survival: the probability that at least 1, 2, ... drafts of a row are accepted; drafts
            beyond the table are rejected.
        drafts: how many drafts a row gets; by default as many as the table has.
        seed: of the draws. A draw depends on it, on the name of the request, the completion and
            the position only, so that policies can be compared on the same draws.

    Raises:
        ConfigError: the table is no survival table.
    """

    survival: Sequence[float]
    drafts: Drafts | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        given = self.survival
        numbers = isinstance(given, list | tuple) and all(isinstance(p, Real) for p in given)
        if not (numbers and given and all(a >= b for a, b in pairwise([1.0, *given, 0.0]))):
            raise ConfigError(
                f"survival is {shown(given)}; it must be probabilities that do not rise, such as "
                "(0.8, 0.6, 0.5): that at least 1, 2, 3 drafts are accepted."
            )
        if not isinstance(self.drafts, Drafts | None):
            raise ConfigError(f"drafts is {shown(self.drafts)}; it must be a Drafts, or None.")

    @property
    def limits(self) -> Drafts:
        """How many drafts each row gets."""
        return self.drafts or Drafts(len(self.survival))

    def num_accepted(self, sequence: ScheduledSequence, num_drafted: int) -> int:
        """How many of these drafts are right at the current position of a sequence."""
        name = sequence.request.request_id
        key = f"{self.seed} {sequence.index} {len(sequence.token_ids)} {name}"
        draw = random.Random(key).random()
        return sum(draw < survives for survives in self.survival[:num_drafted])
