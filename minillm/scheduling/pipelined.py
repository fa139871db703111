"""Planning for a pipeline: several plans in flight, each with other sequences.

    stage 0    plan 1   plan 2   plan 3 .........
    stage 1             plan 1   plan 2   plan 3 ...
                                 commit 1 -> plan 3 may have the sequences of plan 1

With p stages up to p plans are in flight. A sequence that samples is in one of them, because its
next token is known at the commit only. The chunks of a prompt follow each other without waiting.
The decoding sequences are dealt out to p plans, those first that have waited longest.
"""

from collections.abc import Collection, Iterator
from itertools import chain

from minillm.cache.manager import BlockManager
from minillm.scheduling.ahead import Flights, has_room, is_predictable, look_ahead
from minillm.scheduling.config import SchedulerConfig
from minillm.scheduling.drafts import Drafts
from minillm.scheduling.plan import Row
from minillm.scheduling.request import Sequence, Status


def look_beyond(
    flights: Flights,
    running: Collection[Sequence],
    blocks: BlockManager,
    config: SchedulerConfig,
    drafts: Drafts | None = None,
) -> bool:
    """Whether a plan may be made before a commit: one with one stage (`ahead.py`), else several."""
    if config.num_stages == 1:
        return look_ahead(flights, running, blocks, config, drafts)
    return look_past_stages(flights, running, blocks, config)


def look_past_stages(
    flights: Flights, running: Collection[Sequence], blocks: BlockManager, config: SchedulerConfig
) -> bool:
    """Whether one more plan may be made now; then those in flight count as carried out."""
    if not 0 < len(flights.plans) < config.num_stages:
        return False
    rows = list(rows_in_flight(flights))
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


def rows_in_flight(flights: Flights) -> Iterator[tuple[Row, Sequence]]:
    """Rows of running sequences, the oldest plan's first."""
    for plan, _ in flights.plans:
        for row in plan.rows:
            sequence = flights.sequences.get(row.seq_id)
            if sequence is not None and sequence.status is Status.RUNNING:
                yield row, sequence


def in_turn(running: Collection[Sequence], config: SchedulerConfig) -> Iterator[Sequence]:
    """Those that decode, then those with more to compute. With several stages those come first
    whose last row is oldest; with one stage all have a row in every plan."""
    if config.num_stages > 1:
        running = sorted(running, key=lambda each: each.last_step)
    decoding = [each for each in running if each.num_uncomputed == 1]
    prefilling = [each for each in running if each.num_uncomputed > 1]
    return chain(decoding, prefilling)


def most_decoding(num_running: int, config: SchedulerConfig) -> int:
    """Decoding rows of a plan, at most: a share, so that other plans have some, too."""
    return -(-num_running // config.num_stages)
