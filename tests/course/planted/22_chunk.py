"""A prompt is always taken whole: the token budget cuts nothing."""

from minillm.scheduling.scheduler import Scheduler

Scheduler._chunk = lambda self, sequence, budget: sequence.num_uncomputed
