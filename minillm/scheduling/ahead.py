"""Planning a step while the one before it runs, by counts alone.

    plan n        runs .................. committed
    plan n + 1              planned       runs .................. committed
                            assumes that n goes well: its positions are computed, and each of its
                            rows with logits has one token more, whose value no plan needs

A sequence whose next position is not known before the commit of plan n has no row in plan n + 1:
one that forks, computes positions again, verifies drafts, or may have drafts in plan n + 1, which
follow its last token. All others go ahead. The whole plan waits only if memory might not be enough
without a preemption. If a sequence turns out to have finished, its row is wasted work, and its
blocks stay allocated until that step is committed.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Sequence, Status

if TYPE_CHECKING:
    from minillm.scheduling.drafts import Drafts


class Flights:
    """Plans that are not committed, the oldest first, and the sequences in them."""

    def __init__(self) -> None:
        self.plans: list[tuple[StepPlan, StepRecord]] = []
        self.sequences: dict[int, Sequence] = {}

    def enter(self, sequence: Sequence) -> None:
        """The newest plan has a row of it."""
        self.sequences[sequence.seq_id] = sequence
        sequence.last_step = self.plans[-1][0].step
        sequence.num_in_flight += 1

    def leave(self, seq_id: int) -> Sequence:
        """A row of the oldest plan is committed."""
        sequence = self.sequences[seq_id]
        sequence.num_in_flight -= 1
        if not sequence.num_in_flight:
            del self.sequences[seq_id]
        return sequence

    def land(self, plan: StepPlan) -> StepRecord:
        """The oldest plan was carried out; returns its record."""
        if not self.plans or self.plans[0][0].step != plan.step:
            raise AccountingError("Plans are committed once, in the order in which they were made.")
        return self.plans.pop(0)[1]


def look_ahead(
    flights: Flights,
    running: Collection[Sequence],
    blocks: BlockManager,
    config: SchedulerConfig,
    drafts: "Drafts | None" = None,
) -> bool:
    """Whether the plan after the one that runs may be made now; then that counts as carried out."""
    if len(flights.plans) != 1:
        return False
    plan, _ = flights.plans[0]
    rows = [(row, flights.sequences[row.seq_id]) for row in plan.rows]
    rows = [(row, sequence) for row, sequence in rows if sequence.status is Status.RUNNING]
    for row, sequence in rows:
        drafting = drafts is not None and row.num_logits and drafts.wants(sequence, len(running))
        sequence.awaits_commit = bool(drafting) or not is_predictable(row, sequence)
        if sequence.awaits_commit:
            continue
        sequence.num_computed = row.start + row.num_tokens
        # The last token is never computed: a sequence that waits for it has nothing left to do.
        last = sequence.num_tokens + row.num_logits >= end_of(sequence)
        sequence.num_pending = 0 if last else row.num_logits
    rest = [each for each in running if each.num_uncomputed and not each.awaits_commit]
    if rest and has_room(rest, blocks, config):
        return True
    for row, sequence in rows:
        sequence.num_computed, sequence.num_pending = row.start, 0
        sequence.awaits_commit = False
    return False


def is_predictable(row: Row, sequence: Sequence) -> bool:
    """Whether counts alone say where a sequence will stand after this row."""
    simple = row.num_logits <= 1 and not row.num_forks
    return simple and row.start >= sequence.furthest and not sequence.is_void


def end_of(sequence: Sequence) -> int:
    """How many tokens it can have at most."""
    return sequence.end


def has_room(running: list[Sequence], blocks: BlockManager, config: SchedulerConfig) -> bool:
    """Whether what these may compute in one step needs no preemption."""
    num_free = blocks.pool.num_free
    if num_free > 2 * len(running) + config.max_num_batched_tokens // blocks.block_size:
        return True  # each row needs a part of a block more, and a copy
    needed = sum(
        blocks.num_needed(each.table, each.num_computed, each.num_tokens) for each in running
    )
    return needed <= num_free
