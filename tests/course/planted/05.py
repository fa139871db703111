"""The scheduler lets one sequence in at a time: nobody shares a step."""

from dataclasses import replace

from minillm.scheduling.scheduler import Scheduler

_schedule = Scheduler.schedule


def schedule(self):
    self.config = replace(self.config, max_num_seqs=1)
    return _schedule(self)


Scheduler.schedule = schedule
