"""The samples of a step, of which a row with forks has several."""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from minillm.ops.transfers import indices

T = TypeVar("T")


class Samples:
    """Which logits each sample of a step is drawn from: those of its row, once and for each fork.

    Attributes:
        counts: number of samples of each of the logits; None if each has one.
    """

    def __init__(self, num_logits: int, forks: Sequence[int], device: torch.device):
        self.device = device
        self.counts = [1 + fork for fork in forks] if any(forks) else None
        self._logits = range(num_logits) if self.counts is None else repeated(self.counts)

    def spread(self, values: list[T]) -> list[T]:
        """A value for each sample from one for each of the logits, if there are any."""
        return [values[i] for i in self._logits] if values and self.counts else values

    def take(self, logits: Tensor) -> Tensor:
        """[R, V] -> [K, V], the logits of each sample."""
        return logits if self.counts is None else logits[indices(self.device, self._logits)]

    def of_logits(self, members: Sequence[int]) -> list[int]:
        """The samples of some of the logits."""
        if self.counts is None:
            return list(members)
        chosen = set(members)
        return [sample for sample, i in enumerate(self._logits) if i in chosen]

    def repeat(self, edited: Tensor, members: Sequence[int]) -> Tensor:
        """[P, V] of some of the logits, ascending -> the logits of each of their samples."""
        if self.counts is None:
            return edited
        places = repeated([self.counts[i] for i in members])
        return edited.index_select(0, indices(self.device, places))


def repeated(counts: Sequence[int]) -> list[int]:
    """[2, 1] -> [0, 0, 1]"""
    return [i for i, count in enumerate(counts) for _ in range(count)]
