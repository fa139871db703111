"""A preempted sequence begins one block later than it must: its first block is taken as computed,
although its contents are lost."""

from minillm.scheduling.scheduler import Scheduler

begin = Scheduler._begin


def begin_late(self, sequence, match):
    begin(self, sequence, match)
    if sequence.num_preemptions:
        sequence.num_computed = max(sequence.num_computed, self.blocks.block_size)


Scheduler._begin = begin_late
