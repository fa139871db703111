"""Data parallelism: one scheduler per model copy (replica), and joint steps of all copies.

    requests --+--> scheduler 0 --> plan of copy 0 --+
               |                                     +--> joint step: all copies at once
               +--> scheduler 1 --> plan of copy 1 --+

Each copy has its own requests, blocks and prefix cache. A request goes to the copy with the least
load and stays there. A copy without work has an empty share of the joint step. With expert
parallelism (`parallel/experts.py`) its ranks still take part in the step's collectives, so that
the other ranks do not block. One process plans for all copies, so ranks need not synchronise to
find out whether there is work.

seq_ids are unique over all copies. Block numbers are unique over all copies in a joint plan and its
record, and local to the copy in its share.
"""

from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count
from typing import NamedTuple

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockCopy
from minillm.errors import InvalidRequestError
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import Counters, StepRecord
from minillm.scheduling.request import Request, Sequence
from minillm.scheduling.rows import Sampled
from minillm.scheduling.scheduler import Scheduler

WAITING_WEIGHT = 4  # load of a waiting sequence, relative to a running one
EVENTS = "added", "admitted", "preempted", "stalled", "void", "drafted", "forked", "ended"
TIMES = "started", "planned", "computed", "delivered"


class Share(NamedTuple):
    """What one scheduler planned for a joint step."""

    scheduler: Scheduler
    plan: StepPlan
    record: StepRecord


class JointStep(NamedTuple):
    """A joint plan, its record, and the shares of the copies that have work."""

    plan: StepPlan
    record: StepRecord
    shares: list[Share]


class DataParallelScheduler:
    """The interface of `Scheduler` over several; `config` and `blocks` are those of the first."""

    def __init__(self, schedulers: list[Scheduler]):
        self.schedulers = list(schedulers)
        self.config, self.blocks = schedulers[0].config, schedulers[0].blocks
        numbers = count()
        for scheduler in schedulers:
            scheduler.seq_ids = numbers
        self.sequences = ChainMap(*(scheduler.sequences for scheduler in schedulers))
        self.in_flight = ChainMap(*(scheduler.in_flight for scheduler in schedulers))
        self.record = StepRecord(0)
        self._num_steps = self._most_running = 0
        self._steps: deque[JointStep] = deque()  # uncommitted
        self._undelivered: list[JointStep] = []
        self._owners: dict[int, Scheduler] = {}  # by seq_id, for sequences of the last commit

    # ---- state -----------------------------------------------------------------------------

    @property
    def running(self) -> list[Sequence]:
        """Running sequences of all copies."""
        return [one for scheduler in self.schedulers for one in scheduler.running]

    @property
    def waiting(self) -> list[Sequence]:
        """Waiting sequences of all copies."""
        return [one for scheduler in self.schedulers for one in scheduler.waiting]

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished."""
        return any(scheduler.has_work for scheduler in self.schedulers)

    @property
    def counters(self) -> Counters:
        """Totals over all copies; steps are joint steps."""
        total = Counters()
        for scheduler in self.schedulers:
            total = total.plus(scheduler.counters)
        total.num_steps, total.max_num_running = self._num_steps, self._most_running
        return total

    # ---- requests --------------------------------------------------------------------------

    def add(self, request: Request) -> Sequence:
        """Add a request to the copy with the least load.

        Raises:
            InvalidRequestError: its id is in use, or it does not fit even if it runs alone.
        """
        if any(scheduler.knows(request.request_id) for scheduler in self.schedulers):
            raise InvalidRequestError(
                f"There is an unfinished request with the id {request.request_id!r} already."
            )
        return min(self.schedulers, key=load).add(request)

    def abort(self, request_id: str, reason: str = "abort", time: float | None = None) -> None:
        """Finish all sequences of a request; an unknown or finished request is ignored."""
        for scheduler in self.schedulers:
            scheduler.abort(request_id, reason, time)

    def finish(
        self, seq_id: int, reason: str = "stop", time: float | None = None, num_cut: int = 0
    ) -> None:
        """Finish a sequence; a finished one only gets its record corrected."""
        for scheduler in self.schedulers:
            if seq_id in scheduler.sequences:
                return scheduler.finish(seq_id, reason, time, num_cut)
        if (owner := self._owners.get(seq_id)) is not None:
            owner.finish(seq_id, reason, time, num_cut)
        return None

    def restarted(self) -> "DataParallelScheduler":
        """A new scheduler with the same limits and no requests, for use after an internal error."""
        made = DataParallelScheduler([scheduler.restarted() for scheduler in self.schedulers])
        first = self.schedulers[0].seq_ids
        for scheduler in made.schedulers:
            scheduler.seq_ids = first
        made.record, made._num_steps = self.record, self._num_steps
        made._most_running = self._most_running
        return made

    # ---- one joint step: plan --------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step of all copies."""
        if self._steps:
            raise AccountingError("The last plan was not committed.")
        plan = self._plan(lambda copy: copy.schedule() if copy.has_work else None)
        return StepPlan(self._num_steps) if plan is None else plan

    def schedule_ahead(self) -> StepPlan | None:
        """Plan the next joint step before the last is committed; None if no copy can."""
        return self._plan(plan_ahead)

    def _plan(self, schedule: Callable[[Scheduler], StepPlan | None]) -> StepPlan | None:
        self._tell_times()
        plans = [schedule(copy) for copy in self.schedulers]
        if not any(plans):
            return None
        self._num_steps += 1
        joint = StepPlan(self._num_steps)
        record = StepRecord(joint.step)
        record.rows, record.copies = joint.rows, joint.copies
        record.swap_out, record.swap_in = joint.swap_out, joint.swap_in
        shares: list[Share] = []
        for index, (scheduler, plan) in enumerate(zip(self.schedulers, plans, strict=True)):
            joint.shares.append(StepPlan(joint.step) if plan is None else plan)
            if plan is not None:
                self._join(joint, plan, index)
                shares.append(Share(scheduler, plan, scheduler.record))
                record.blocked = record.blocked or scheduler.record.blocked
                share_events(record, scheduler.record)
        for copy in self.schedulers:
            record.num_running += len(copy.running)
            record.num_waiting += len(copy.waiting)
            record.num_free_blocks += copy.blocks.pool.num_free
        self._most_running = max(self._most_running, record.num_running)
        self.record = record
        self._steps.append(JointStep(joint, record, shares))
        return joint

    def _join(self, joint: StepPlan, plan: StepPlan, index: int) -> None:
        """Add the plan of copy `index` to the joint plan, with block numbers unique over copies."""
        blocks = self.blocks
        device, host = index * blocks.pool.num_blocks, index * blocks.host.num_blocks
        joint.dropped += plan.dropped
        joint.new += plan.new
        joint.rows += [shifted(row, device) for row in plan.rows]
        joint.copies += moved(plan.copies, device, device)
        joint.swap_out += moved(plan.swap_out, device, host)
        joint.swap_in += moved(plan.swap_in, host, device)

    def _tell_times(self) -> None:
        """Copy the times of joint steps to the records of their shares."""
        for step in self._undelivered:
            for share in step.shares:
                copy_times(step.record, share.record)
        self._undelivered = [output for output in self._undelivered if not output.record.delivered]

    # ---- one joint step: commit ------------------------------------------------------------

    def invalidate(self, plan: StepPlan, suspect: Collection[int]) -> None:
        """Before the commit, invalidate the blocks of failed rows (`suspect`: seq_ids)."""
        for share in self._oldest(plan).shares:
            share.scheduler.invalidate(share.plan, suspect)

    def commit(
        self,
        plan: StepPlan,
        sampled: Mapping[int, Sampled],
        num_drafted: Mapping[int, int] | None = None,
    ) -> list[Sequence]:
        """Apply the result of the oldest joint plan; returns the forks of all copies."""
        step = self._oldest(plan)
        forks: list[Sequence] = []
        self._owners = {}
        for share in step.shares:
            copy_times(step.record, share.record)
            new = share.scheduler.commit(share.plan, sampled, num_drafted)
            ids = [row.seq_id for row in share.plan.rows] + [fork.seq_id for fork in new]
            self._owners |= dict.fromkeys(ids, share.scheduler)
            forks += new
            step.record.num_recomputed_tokens += share.record.num_recomputed_tokens
        self._undelivered.append(self._steps.popleft())
        return forks

    def _oldest(self, plan: StepPlan) -> JointStep:
        if not self._steps or self._steps[0].plan is not plan:
            raise AccountingError("Plans are committed once, in the order in which they were made.")
        return self._steps[0]


def schedulers_of(scheduler: "Scheduler | DataParallelScheduler") -> list[Scheduler]:
    """The schedulers of all model copies."""
    return scheduler.schedulers if isinstance(scheduler, DataParallelScheduler) else [scheduler]


def end_all(scheduler: "Scheduler | DataParallelScheduler", reason: str, time: float) -> None:
    """Record the end of all unfinished sequences, after the engine was interrupted."""
    for copy in schedulers_of(scheduler):
        copy.log.end_all(copy.sequences.values(), reason, copy.in_flight, time)


def reset_prefix_cache(scheduler: "Scheduler | DataParallelScheduler") -> None:
    """Empty the prefix cache of all copies."""
    for copy in schedulers_of(scheduler):
        copy.blocks.reset_prefix_cache()


def load(scheduler: Scheduler) -> int:
    """The load of a copy: its running sequences and its waiting sequences, weighted."""
    return scheduler.num_seqs + WAITING_WEIGHT * len(scheduler.waiting)


def plan_ahead(scheduler: Scheduler) -> StepPlan | None:
    """A copy's next plan while joint steps are in flight; the copy may have no share in them."""
    if scheduler.in_flight:
        return scheduler.schedule_ahead()
    return scheduler.schedule() if scheduler.has_work else None


def share_events(joint: StepRecord, record: StepRecord) -> None:
    """Add a copy's events to the joint record, and let both records share the event lists."""
    for name in EVENTS:
        events = getattr(joint, name)
        events += getattr(record, name)
        setattr(record, name, events)
    joint.num_prefill_tokens += record.num_prefill_tokens
    joint.num_decode_tokens += record.num_decode_tokens


def copy_times(joint: StepRecord, record: StepRecord) -> None:
    """Copy the times of a joint step to the record of a share."""
    for name in TIMES:
        setattr(record, name, getattr(joint, name))


def shifted(row: Row, first: int) -> Row:
    """The row with `first` added to its block numbers."""
    return row._replace(blocks=tuple(block + first for block in row.blocks)) if row.blocks else row


def moved(copies: Iterable[BlockCopy], source: int, target: int) -> list[BlockCopy]:
    """The block copies with `source` and `target` added to their block numbers."""
    return [BlockCopy(one[0] + source, one[1] + target) for one in copies]
