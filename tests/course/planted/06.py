"""Nobody is admitted while anybody runs: batching is static again."""

from minillm.scheduling.record import Blocked
from minillm.scheduling.scheduler import Scheduler

_right = Scheduler._refusal


def _refusal(self, budget):
    if self.running:
        return Blocked.of(self.waiting[0], "batch slots", 1, 0)
    return _right(self, budget)


Scheduler._refusal = _refusal
