"""The seat of the first request that ends is never given back: one fewer for all who follow."""

from minillm.scheduling.scheduler import Scheduler

_right = Scheduler._stop_running


def _stop_running(self, sequence):
    _right(self, sequence)
    if not hasattr(self, "lost"):
        self.lost = True
        self.num_seqs += 1


Scheduler._stop_running = _stop_running
