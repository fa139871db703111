"""A prompt is always taken whole: chunking is disabled and the token budget cuts nothing."""

from minillm.scheduling.scheduler import Scheduler

Scheduler._chunk = lambda self, sequence, budget: sequence.num_uncomputed
