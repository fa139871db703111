"""Asynchronous scheduling: plan n + 1 is made while step n runs.

    plan n        runs .................. committed
    plan n + 1              planned       runs .................. committed

Plan n + 1 assumes that step n succeeds: its positions are computed, and each row with logits adds
one token. A plan needs the number of tokens, not their values.

A sequence has no row in plan n + 1 if its next position depends on the commit of plan n: it forks,
recomputes positions, verifies drafts, has structured_outputs, or may get drafts in plan n + 1. The
whole plan n + 1 waits for the commit if it might need a preemption. If a sequence finishes in step
n, its row in plan n + 1 is discarded, and its blocks are freed at the commit of plan n + 1.
"""

from collections.abc import Collection, Iterator

from minillm.cache.blocks import AccountingError
from minillm.cache.manager import BlockManager
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row, StepPlan
from minillm.scheduling.record import StepRecord
from minillm.scheduling.request import Sequence, Status


class InFlight(dict[int, Sequence]):
    """Sequences of uncommitted plans by seq_id, and these `plans` with their records, the oldest
    first."""

    def __init__(self) -> None:
        self.plans: list[tuple[StepPlan, StepRecord]] = []

    def add_row(self, sequence: Sequence) -> None:
        """Count a row of this sequence in the newest plan."""
        self[sequence.seq_id] = sequence
        sequence.last_step = self.plans[-1][0].step
        sequence.num_in_flight += 1

    def remove_row(self, seq_id: int) -> Sequence:
        """Count a row of the oldest plan as committed; returns its sequence."""
        sequence = self[seq_id]
        sequence.num_in_flight -= 1
        if not sequence.num_in_flight:
            del self[seq_id]
        return sequence

    def remove_plan(self, plan: StepPlan) -> StepRecord:
        """Remove the oldest plan, which is being committed; returns its record."""
        if not self.plans or self.plans[0][0].step != plan.step:
            raise AccountingError("Plans are committed once, in the order in which they were made.")
        return self.plans.pop(0)[1]


def prepare_ahead(
    in_flight: InFlight,
    running: Collection[Sequence],
    blocks: BlockManager,
    config: SchedulerConfig,
    drafts: Drafts | None = None,
) -> bool:
    """Whether the next plan may be made while one plan is uncommitted, or with a pipeline fewer
    than `num_stages` plans.

    If so, sequences are advanced as if these plans were committed, or marked `awaits_commit`.
    """
    if not 0 < len(in_flight.plans) < max(config.num_stages, 2):
        return False
    rows, in_pipeline = list(rows_in_flight(in_flight)), config.num_stages > 1
    for row, sequence in rows:
        # In a pipeline the token is on another stage; drafts are proposed behind known tokens.
        drafted = drafts is not None and row.num_logits and drafts.wants(sequence, len(running))
        waits = drafted or (in_pipeline and row.num_logits)
        if waits or not is_predictable(row, sequence):
            sequence.awaits_commit = True
            continue
        sequence.num_computed = row.start + row.num_tokens
        # The last new token is sampled but never computed: no more rows for this sequence.
        last = sequence.num_tokens + row.num_logits >= end_of(sequence)
        sequence.num_pending = 0 if last else row.num_logits
    rest = [other for other in running if other.num_uncomputed and not other.awaits_commit]
    if rest and has_room(rest, blocks, config):
        return True
    for row, sequence in reversed(rows):  # of a prompt's chunks the first is the last
        sequence.num_computed, sequence.num_pending = row.start, 0
        sequence.awaits_commit = False
    return False


def rows_in_flight(in_flight: InFlight) -> Iterator[tuple[Row, Sequence]]:
    """Rows in flight of running sequences, those of the oldest plan first."""
    for plan, _ in in_flight.plans:
        for row in plan.rows:
            sequence = in_flight.get(row.seq_id)
            if sequence is not None and sequence.status is Status.RUNNING:
                yield row, sequence


def is_predictable(row: Row, sequence: Sequence) -> bool:
    """Whether the sequence's position after this row is known before its tokens are sampled."""
    simple = row.num_logits <= 1 and not row.num_forks
    if row.num_logits and sequence.request.params.structured_outputs is not None:
        return False  # the mask of the next position needs the token
    return simple and row.start >= sequence.furthest and not sequence.is_void


def end_of(sequence: Sequence) -> int:
    """Maximum number of tokens of a sequence, prompt included."""
    return sequence.end


def has_room(running: list[Sequence], blocks: BlockManager, config: SchedulerConfig) -> bool:
    """Whether the next step of these sequences needs no preemption."""
    num_free = blocks.pool.num_free
    if num_free > 2 * len(running) + config.max_num_batched_tokens // blocks.block_size:
        return True  # per row at most one partly filled block and one copy
    needed = sum(
        blocks.num_needed(each.table, each.num_computed, each.num_tokens) for each in running
    )
    return needed <= num_free
