"""What must be true between any two calls of the scheduler, checked by comparing all books.

Tests call it after every step; it is linear in the number of blocks and sequences.
"""

from itertools import pairwise

from minillm.cache.blocks import AccountingError
from minillm.scheduling.request import Sequence, Status
from minillm.scheduling.scheduler import Scheduler


def check_invariants(scheduler: Scheduler) -> None:
    """Block tables against pools, seats against the running set, lines against sequences.

    Raises:
        AccountingError: they do not add up, which is a bug of `scheduling/` or of `cache/`.
    """
    held = {**scheduler.sequences, **scheduler.in_flight}
    scheduler.blocks.check_invariants(sequence.table for sequence in held.values())
    running, waiting = scheduler.running, scheduler.waiting
    seats, most = sum(seq.num_seats for seq in running), scheduler.config.max_num_seqs
    if seats != scheduler.num_seats or seats > most:
        raise AccountingError(f"{seats} of {most} seats taken, {scheduler.num_seats} booked.")
    for line in (running, waiting):
        if any(one.key >= other.key for one, other in pairwise(line)):
            raise AccountingError("A line is out of order.")
    lines = {sequence.seq_id: sequence for sequence in (*running, *waiting)}
    if lines.keys() != scheduler.sequences.keys() or len(lines) != len(running) + len(waiting):
        raise AccountingError("A sequence is in no line or in two.")
    for sequence in running:
        check_sequence(sequence, scheduler.blocks.block_size)
        if sequence.status is not Status.RUNNING or sequence.is_swapped:
            raise AccountingError(f"Sequence {sequence.seq_id} is not really running.")
    for sequence in waiting:
        check_sequence(sequence, scheduler.blocks.block_size)
        if sequence.status is not Status.WAITING or sequence.table.blocks:
            raise AccountingError(f"Sequence {sequence.seq_id} waits, but holds blocks.")


def check_sequence(sequence: Sequence, block_size: int) -> None:
    """One sequence: something is left to compute, and what is computed has its blocks."""
    held = len(sequence.table.blocks) + len(sequence.table.host_blocks)
    to_come = not sequence.num_in_flight  # a plan that runs may be the last
    if not 0 <= sequence.num_computed <= sequence.num_tokens - to_come:
        raise AccountingError(f"Sequence {sequence.seq_id} has nothing to compute.")
    if sequence.num_computed > held * block_size:
        raise AccountingError(f"Sequence {sequence.seq_id} has computed more than it holds.")
