"""Simulated drafts: the number of accepted drafts is drawn from a table, without a model.

    survival   0.8    0.6    0.5        P(at least one, two, three drafts are accepted)
    draw       0.55   0.55   -          one uniform number per row: two are accepted here

A simulation makes the scheduler's decisions under this acceptance. It does not show that a real
proposer reaches it: report such results as simulated.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from numbers import Real

from minillm.api.sampling_params import shown
from minillm.errors import ConfigError
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.request import Sequence


@dataclass(frozen=True)
class SimulatedDrafts:
    """Drafts for `Simulation(speculation=...)`.

    Attributes:
        survival: probabilities that at least 1, 2, ... drafts of a row are accepted; drafts beyond
            the table are rejected.
        seed: seed of the draws. A draw depends only on seed, request id, completion and position,
            so that policies are compared on the same draws.

    Raises:
        ConfigError: `survival` is not a list of non-increasing probabilities.
    """

    survival: tuple[float, ...]
    seed: int = 0

    def __post_init__(self) -> None:
        given = self.survival
        numbers = isinstance(given, list | tuple) and all(isinstance(p, Real) for p in given)
        if not (numbers and given and all(a >= b for a, b in pairwise([1.0, *given, 0.0]))):
            raise ConfigError(
                f"survival is {shown(given)}; it must be probabilities that do not rise, such as "
                "(0.8, 0.6, 0.5): that at least 1, 2, 3 drafts are accepted."
            )

    @property
    def limits(self) -> Drafts:
        """The number of drafts per row: the length of the table."""
        return Drafts(len(self.survival))

    def num_accepted(self, sequence: Sequence, num_drafted: int) -> int:
        """Number of accepted drafts at the current position of a sequence."""
        name = sequence.request.request_id
        key = f"{self.seed} {sequence.index} {len(sequence.token_ids)} {name}"
        draw = random.Random(key).random()
        return sum(draw < survives for survives in self.survival[:num_drafted])
