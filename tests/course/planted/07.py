"""Paging is off: a sequence is admitted with, and gets at once, the blocks of its longest form."""

from minillm.scheduling.admission import Admission
from minillm.scheduling.policies import reserve_max
from minillm.scheduling.scheduler import Scheduler

_add_row = Scheduler._add_row


def add_row(self, plan, sequence, num_tokens):
    if not sequence.table.blocks:
        self.blocks.grow(sequence.table, 0, sequence.request.max_computed)
    _add_row(self, plan, sequence, num_tokens)


Admission.target = lambda self, sequence: reserve_max(sequence, self.blocks.block_size)
Scheduler._add_row = add_row
