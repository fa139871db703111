"""Sorted queues of sequences: a list in ascending order of `Sequence.key`, with binary search."""

from bisect import bisect_left, insort

from minillm.cache.blocks import AccountingError
from minillm.scheduling.request import Key, Sequence


def key_of(sequence: Sequence) -> Key:
    """The sort key: the smallest is scheduled first."""
    return sequence.key


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Insert a sequence in order."""
    insort(queue, sequence, key=key_of)


def remove(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence."""
    place = bisect_left(queue, sequence.key, key=key_of)
    if place >= len(queue) or queue[place] is not sequence:
        raise AccountingError(f"Sequence {sequence.seq_id} is not in this queue.")
    del queue[place]
