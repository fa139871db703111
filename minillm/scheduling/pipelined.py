"""Planning for pipeline parallelism: several plans in flight, with different sequences.

    stage 0    plan 1   plan 2   plan 3 .........
    stage 1             plan 1   plan 2   plan 3 ...
                                 commit 1 -> plan 3 may have the sequences of plan 1

With p stages, up to p plans are in flight. A sequence that samples is in at most one of them, since
its next row needs the sampled token. The prefill chunks of one prompt may be in consecutive plans.
A plan has decode rows for at most 1 / p of the running sequences, the longest waiting first.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from minillm.cache.manager import BlockManager
from minillm.scheduling.ahead import (
    UncommittedPlans,
    has_room,
    is_predictable,
    prepare_single_stage,
)
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row
from minillm.scheduling.request import Sequence, Status


def prepare_ahead(
    uncommitted: UncommittedPlans,
    running: Collection[Sequence],
    blocks: BlockManager,
    config: SchedulerConfig,
    drafts: Drafts | None = None,
) -> bool:
    """Whether the next plan may be made before the commit, for any number of stages."""
    if config.num_stages == 1:
        return prepare_single_stage(uncommitted, running, blocks, config, drafts)
    return prepare_pipeline(uncommitted, running, blocks, config)


def prepare_pipeline(
    uncommitted: UncommittedPlans,
    running: Collection[Sequence],
    blocks: BlockManager,
    config: SchedulerConfig,
) -> bool:
    """Whether the next plan may be made while fewer than `num_stages` plans are in flight.

    If so, prefilling sequences are advanced as if these plans were committed.
    """
    if not 0 < len(uncommitted.plans) < config.num_stages:
        return False
    rows = list(rows_in_flight(uncommitted))
    for row, sequence in rows:
        if row.num_logits or not is_predictable(row, sequence):
            sequence.awaits_commit = True
        else:
            sequence.num_computed = row.start + row.num_tokens
    rest = [each for each in running if each.num_uncomputed and not each.awaits_commit]
    if rest and has_room(rest, blocks, config):
        return True
    for row, sequence in reversed(rows):
        sequence.num_computed, sequence.awaits_commit = row.start, False
    return False


def rows_in_flight(uncommitted: UncommittedPlans) -> Iterator[tuple[Row, Sequence]]:
    """Rows in flight of running sequences, those of the oldest plan first."""
    for plan, _ in uncommitted.plans:
        for row in plan.rows:
            sequence = uncommitted.sequences.get(row.seq_id)
            if sequence is not None and sequence.status is Status.RUNNING:
                yield row, sequence


def scheduling_order(running: Collection[Sequence], config: SchedulerConfig) -> Iterator[Sequence]:
    """Running sequences in the order in which a plan takes them: decode first, then prefill. With
    several stages, each part is sorted by the age of the last row, the oldest first."""
    if config.num_stages > 1:
        running = sorted(running, key=lambda each: each.last_step)
    decoding = [each for each in running if each.num_uncomputed == 1]
    prefilling = [each for each in running if each.num_uncomputed > 1]
    return chain(decoding, prefilling)


def most_decoding(num_running: int, config: SchedulerConfig) -> int:
    """Maximum number of decode rows per plan: an equal share for each plan in flight."""
    return -(-num_running // config.num_stages)
