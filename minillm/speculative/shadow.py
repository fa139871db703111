"""The KV cache of a draft model. It uses the target's block tables and block numbers.

    block table    [ 7             ][ 3             ][ 9             ]
    target         [ ############# ][ ############# ][ ####          ]
    draft          [ ############# ][ #####         ][               ]
    filled           16               6                0

Prefix cache hits, forks, copies and swaps apply to both caches. But the draft model computes a
position only when it drafts after it, and it also computes positions of drafts that are rejected.
So each block has a mark: the number of its first positions with valid KV. Copies and swaps carry
the mark along. When the target writes a position, the mark is lowered to it, because the draft
model's KV from there on belongs to drafts or to an earlier owner of the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from minillm.cache.manager import BlockCopy
from minillm.layers.kv_cache import KVCache
from minillm.models.batches import Numbers
from minillm.scheduling.plan import StepPlan


@dataclass(slots=True)
class Table:
    """The blocks of a sequence. The first `num_full` are known to be fully valid."""

    blocks: list[int] = field(default_factory=list)
    num_full: int = 0


class Shadow:
    """The KV of a draft model, and the number of valid positions per block.

    Attributes:
        filled: int64 [blocks], the mark of each block of `kv`.
        filled_on_host: the same for the blocks of `host`.
    """

    def __init__(self, kv: KVCache, host: KVCache | None):
        self.kv, self.host = kv, host
        self.filled: Numbers = np.zeros(kv.num_blocks, dtype=np.int64)
        num_host_blocks = 0 if host is None else host.num_blocks
        self.filled_on_host: Numbers = np.zeros(num_host_blocks, dtype=np.int64)
        self._tables: dict[int, Table] = {}

    def follow(self, plan: StepPlan) -> None:
        """Apply the plan's copies and swaps, and lower the marks to the positions it writes.
        `forget` must be called first for the sequences it drops."""
        if self.host is not None and plan.swap_out:
            move(plan.swap_out, (self.kv, self.filled), (self.host, self.filled_on_host))
        if plan.copies:
            move(plan.copies, (self.kv, self.filled), (self.kv, self.filled))
        if self.host is not None and plan.swap_in:
            move(plan.swap_in, (self.host, self.filled_on_host), (self.kv, self.filled))
        for row in plan.rows:
            if (table := self._tables.get(row.seq_id)) is None:
                table = self._tables[row.seq_id] = Table()
            table.blocks[row.num_kept :] = row.blocks
            self._end_marks(table, row.start, row.start + row.num_tokens)

    def forget(self, seq_id: int) -> None:
        """Remove a sequence. The marks stay, because other sequences may share its blocks."""
        self._tables.pop(seq_id, None)

    def num_computed(self, seq_id: int) -> int:
        """Number of leading positions of a sequence with valid KV."""
        size, table = self.kv.block_size, self._tables[seq_id]
        for block in table.blocks[table.num_full :]:
            if self.filled[block] < size:
                return table.num_full * size + int(self.filled[block])
            table.num_full += 1
        return table.num_full * size

    def mark(self, seq_id: int, start: int, end: int) -> None:
        """Mark positions `start` to `end` as valid. All earlier positions must be valid."""
        size, blocks = self.kv.block_size, self._tables[seq_id].blocks
        for place in range(start // size, -(-end // size)):
            block, right = blocks[place], min(end - place * size, size)
            self.filled[block] = max(self.filled[block], right)

    def _end_marks(self, table: Table, start: int, end: int) -> None:
        """Lower the marks because the target writes positions `start` to `end`."""
        size = self.kv.block_size
        first = start // size
        table.num_full = min(table.num_full, first)
        for place in range(first, -(-end // size)):
            block, kept = table.blocks[place], max(start - place * size, 0)
            if self.filled[block] > kept:
                self.filled[block] = kept


def move(
    copies: Sequence[BlockCopy], source: tuple[KVCache, Numbers], target: tuple[KVCache, Numbers]
) -> None:
    """Copy blocks and their marks between caches, or within one."""
    source[0].copy_blocks(copies, target[0])
    pairs = np.array(copies, dtype=np.int64)
    target[1][pairs[:, 1]] = source[1][pairs[:, 0]]
