"""Rows whose keys and values may be wrong, and the sequences that read them in the same step.

A prompt's blocks are findable from the moment its row is scheduled, so another row of that plan, or
of the plan behind it, may read what the row writes:

    writer   [ block 0 ][ block 1 ][ ...           its row fails: it ends with an error
    reader   [ block 0 ][ block 1 ][ own ...       its row is void: it is computed again

A void row is neither delivered nor counted. Its sequence gives up its blocks once no plan uses them
any more, and waits at its old place in line, as after a preemption. A chunk in the middle of a
prompt has no logits, so NaN in it is noticed only at the end of the prompt: sequences that adopted
its blocks in an earlier step are not void, and fail by their own logits.
"""

from collections.abc import Collection, Iterable, Mapping

from minillm.cache.manager import BlockManager
from minillm.scheduling.plan import Row
from minillm.scheduling.request import Sequence


def distrust(
    rows: Iterable[Row],
    suspect: Collection[int],
    in_flight: Mapping[int, Sequence],
    blocks: BlockManager,
) -> None:
    """Before the commit of a plan with `rows`, of which those of `suspect` may be wrong: nothing
    that they computed stays findable, and every sequence that reads it is void."""
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
