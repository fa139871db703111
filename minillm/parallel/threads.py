"""Ranks that are threads of one process: for tests, chapters and experiments."""

from threading import Barrier, BrokenBarrierError

import torch
from torch import Tensor

from minillm.parallel.communicator import PATIENCE, Communicator


class ThreadGroup:
    """What the threads share: a place for the part of each, and a barrier."""

    def __init__(self, size: int, patience: float = PATIENCE):
        self.parts: list[Tensor | None] = [None] * size
        self.barrier = Barrier(size, timeout=patience)

    def communicators(self) -> list["ThreadCommunicator"]:
        """One for each thread."""
        return [ThreadCommunicator(rank, self) for rank in range(len(self.parts))]


class ThreadCommunicator(Communicator):
    """One of the threads."""

    def __init__(self, rank: int, group: ThreadGroup):
        super().__init__(rank, len(group.parts))
        self._group = group

    def exchange(self, part: Tensor) -> Tensor:
        """[..] -> [size, ..]"""
        group = self._group
        group.parts[self.rank] = part
        self._meet()
        parts = torch.stack([each for each in group.parts if each is not None])
        self._meet()  # nobody may overwrite its part before all have read it
        return parts

    def abort(self) -> None:
        """Those who wait get an error."""
        self._group.barrier.abort()

    def _meet(self) -> None:
        try:
            self._group.barrier.wait()
        except BrokenBarrierError:
            raise self.stopped() from None
