"""A line of sequences in the order of their keys: constant-time ends, logarithmic search."""

from bisect import bisect_left, insort

from minillm.cache.blocks import AccountingError
from minillm.scheduling.request import Key, Sequence


def key_of(sequence: Sequence) -> Key:
    """Smaller keys go first."""
    return sequence.key


def enter(line: list[Sequence], sequence: Sequence) -> None:
    """Put a sequence into its place."""
    insort(line, sequence, key=key_of)


def leave(line: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out."""
    place = bisect_left(line, sequence.key, key=key_of)
    if place >= len(line) or line[place] is not sequence:
        raise AccountingError(f"Sequence {sequence.seq_id} is not in line.")
    del line[place]
