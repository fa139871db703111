"""Chapter 12: the engine's scheduler over a simulated device, on a virtual clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from minillm import SamplingParams
from minillm.cache.manager import BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Request
from minillm.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class Turn:
    """A step on the virtual clock: when the processor planned it and the simulated device computed
    it (each from, to), its number of rows, and how many of them were discarded."""

    planned: tuple[int, int]
    computed: tuple[int, int]
    rows: int
    discarded: int


@dataclass(frozen=True)
class Job:
    """A request for at most `most` tokens, which writes END as its token number `writes`."""

    writes: int
    most: int
    prompt: int = 1


class SimulatedDevice:
    """Computes one step after another, each in `seconds` of the virtual clock, in the order of
    their launches."""

    def __init__(self, seconds: int) -> None:
        self.seconds, self.free_at = seconds, 0

    def launch(self, now: int) -> tuple[int, int]:
        """When a step that is launched now begins and ends."""
        begins = max(now, self.free_at)
        self.free_at = begins + self.seconds
        return begins, self.free_at


def drive(jobs: Sequence[Job], plan: int, compute: int, ahead: bool, seats: int = 8) -> list[Turn]:
    """The engine's scheduler over a simulated device: the processor plans a step in `plan`, the
    device computes it in `compute`. With `ahead` the next step is planned and launched before the
    tokens of this one are known, like the engine's `async_scheduling`."""
    scheduler = _scheduler(jobs, seats)
    device, now = SimulatedDevice(compute), 0
    turns: list[Turn] = []
    steps: list[tuple[StepPlan, StepRecord, tuple[int, int], tuple[int, int]]] = []

    def begin(made: StepPlan | None) -> int:
        if made is None:
            return now
        steps.append((made, scheduler.record, (now, now + plan), device.launch(now + plan)))
        return now + plan

    while scheduler.has_work or steps:
        if not steps:
            now = begin(scheduler.schedule())
        if ahead:
            now = begin(scheduler.schedule_ahead())
        made, record, planned, computed = steps.pop(0)
        now = max(now, computed[1])
        _commit(scheduler, made, jobs)
        discarded = sum(ended.discarded for ended in record.ended)
        turns.append(Turn(planned, computed, len(made.rows), discarded))
    return turns


def _scheduler(jobs: Sequence[Job], seats: int) -> Scheduler:
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=seats), BlockManager(1000, 16, None))
    for number, job in enumerate(jobs):
        params = SamplingParams(max_tokens=job.most, temperature=0)
        scheduler.add(Request(str(number), (1,) * job.prompt, params, job.most, arrival=0.0))
    return scheduler


def _commit(scheduler: Scheduler, made: StepPlan, jobs: Sequence[Job]) -> None:
    """Give the scheduler the tokens of a step, and finish the requests that wrote END."""
    owners = {row.seq_id: scheduler.in_flight[row.seq_id] for row in made.rows}
    scheduler.commit(made, {row.seq_id: [1] * row.num_samples for row in _sampling(made)})
    for seq_id, sequence in owners.items():
        job = jobs[int(sequence.request.request_id)]
        if sequence.num_tokens - job.prompt >= job.writes:
            scheduler.finish(seq_id, "stop")


def _sampling(made: StepPlan) -> list[Row]:
    return [row for row in made.rows if row.num_samples]


def bubbles(turns: Sequence[Turn]) -> int:
    """How often the device waited between two steps."""
    return sum(after.computed[0] > before.computed[1] for before, after in pairwise(turns))
