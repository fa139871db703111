"""Consistency checks of the scheduler's state, for tests: run after every step.

The cost is linear in the number of blocks and sequences.
"""

from itertools import pairwise

from minillm.cache.blocks import AccountingError
from minillm.scheduling.request import Sequence, Status
from minillm.scheduling.scheduler import Scheduler
from tests.cache.books import check_tables


def check_invariants(scheduler: Scheduler) -> None:
    """Check block tables, the count of running sequences, and both queues.

    Raises:
        AccountingError: they are inconsistent: a bug of `scheduling/` or `cache/`.
    """
    held = {**scheduler.sequences, **scheduler.in_flight}
    check_tables(scheduler.blocks, (sequence.table for sequence in held.values()))
    running, waiting = scheduler.running, scheduler.waiting
    taken, most = sum(seq.num_seqs for seq in running), scheduler.config.max_num_seqs
    if taken != scheduler.num_seqs or taken > most:
        raise AccountingError(
            f"{taken} of {most} sequences are running; counted: {scheduler.num_seqs}."
        )
    for queue in (running, waiting):
        if any(one.key >= other.key for one, other in pairwise(queue)):
            raise AccountingError("A queue is not sorted by key.")
    queued = {sequence.seq_id: sequence for sequence in (*running, *waiting)}
    if queued.keys() != scheduler.sequences.keys() or len(queued) != len(running) + len(waiting):
        raise AccountingError("A sequence is in neither queue, or in both.")
    for sequence in running:
        check_sequence(sequence, scheduler.blocks.block_size)
        if sequence.status is not Status.RUNNING or sequence.is_swapped:
            raise AccountingError(
                f"Sequence {sequence.seq_id} is running without that status, or swapped out."
            )
    for sequence in waiting:
        check_sequence(sequence, scheduler.blocks.block_size)
        if sequence.status is not Status.WAITING or sequence.table.blocks:
            raise AccountingError(
                f"Sequence {sequence.seq_id} is waiting without that status, or holds blocks."
            )


def check_sequence(sequence: Sequence, block_size: int) -> None:
    """Check that a sequence has tokens left to compute, and blocks for all computed ones."""
    held = len(sequence.table.blocks) + len(sequence.table.host_blocks)
    to_come = not sequence.num_in_flight  # a plan in flight may compute the last one
    if not 0 <= sequence.num_computed <= sequence.num_tokens - to_come:
        raise AccountingError(f"Sequence {sequence.seq_id} has nothing to compute.")
    if sequence.num_computed > held * block_size:
        raise AccountingError(f"Sequence {sequence.seq_id} has computed more than it holds.")
