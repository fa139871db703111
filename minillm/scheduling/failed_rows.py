"""Failed rows (for example NaN logits), and the sequences that read the blocks they wrote.

A prompt's blocks are in the prefix cache as soon as its row is scheduled. Other rows of that plan
and of the next one may therefore read what this row writes:

    writer   [ block 0 ][ block 1 ][ ...           its row fails: the request ends with an error
    reader   [ block 0 ][ block 1 ][ own ...       its row is void: discarded and recomputed

The tokens of a void row are discarded and not counted. Its sequence is requeued like a preempted
one, once none of its rows is in flight. A prefill chunk before the last has no logits, so NaN in it
is noticed only at the end of the prompt. Sequences that adopted such blocks in an earlier step are
not void, and fail by their own logits.
"""

from collections.abc import Collection, Iterable, Mapping

from minillm.cache.manager import BlockManager
from minillm.scheduling.plan import Row
from minillm.scheduling.request import Sequence


def invalidate(
    rows: Iterable[Row],
    suspect: Collection[int],
    in_flight: Mapping[int, Sequence],
    blocks: BlockManager,
) -> None:
    """Invalidate what the sequences `suspect` computed in `rows`, before the plan is committed.

    Their blocks leave the prefix cache, and every sequence in flight that adopted these is void.
    """
    wrong: set[int] = set()
    for row in rows:
        if row.seq_id in suspect:
            table = in_flight[row.seq_id].table
            wrong.update(table.blocks[row.start // blocks.block_size :])
            blocks.forget(table)
    for sequence in in_flight.values():
        if not wrong.isdisjoint(sequence.table.adopted):
            sequence.is_void = True
            blocks.forget(sequence.table)
