"""No step is ever planned before the tokens of the one before are there."""

from minillm.scheduling.scheduler import Scheduler

Scheduler.schedule_ahead = lambda self: None
