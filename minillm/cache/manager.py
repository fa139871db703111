"""Block manager: the block table of each sequence, prefix sharing, copy-on-write and swapping.

    positions   0 ............. num_computed ......... end
    blocks      [ full ][ full ][ partly filled ][ new ]
                 may be shared   copied first if    allocated
                 and cached      shared or cached   by `grow`

A block table grows at its end. If its partly filled last block is shared or cached, it is replaced
by a copy before it is written (copy-on-write). Full blocks are never written again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, NamedTuple

from msgspec import Meta

from minillm.api.outputs import PrefixReport
from minillm.cache.blocks import BlockPool
from minillm.cache.hash_chain import HashChain
from minillm.cache.misses import PrefixHistory
from minillm.cache.prefix import Cursor, Match, PrefixIndex
from minillm.cache.radix import RadixTree

# Of blocks, tokens, sequences: the range that msgspec checks where a file is read.
Count = Annotated[int, Meta(ge=0, lt=2**31)]


class BlockCopy(NamedTuple):
    """Copy the contents of block `source` to block `target` before the step computes any row."""

    source: Count
    target: Count


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence: on the device, or in host memory while it is swapped out.

    Its full blocks enter the prefix cache only while `epoch` equals the manager's.
    """

    salt: str = ""  # the request's `cache_salt`
    blocks: list[int] = field(default_factory=list)  # block numbers on the device
    host_blocks: list[int] = field(default_factory=list)  # block numbers in host memory
    num_adopted: int = 0  # leading blocks that came from the prefix cache
    cursor: Cursor = None  # end of the indexed blocks in the prefix index
    num_indexed: int = 0  # leading blocks that are in the prefix index
    name: int = 0  # hash of the indexed blocks in `PrefixHistory`
    epoch: int = 0  # manager's epoch at the start; -1: blocks may be wrong

    @property
    def adopted(self) -> list[int]:
        """The blocks that came from the prefix cache."""
        return self.blocks[: self.num_adopted]


class BlockManager:
    """Manages `num_blocks` blocks of `block_size` tokens on the device, and the swap space.

    `prefix_cache` is "hash", "radix" or None. `epoch` counts the resets of the prefix cache.
    `unwritten` maps cached blocks to the step that will write them.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: str | None = None,
        num_host_blocks: int = 0,
    ):
        self.block_size = block_size
        self.index = make_index(prefix_cache, block_size)
        self.pool = BlockPool(num_blocks, self.index)
        self.host = BlockPool(num_host_blocks, make_index(None, block_size))
        self.num_copies = 0
        self.epoch = 0
        self.unwritten: dict[int, int] = {}
        self.prefix_cache = prefix_cache
        self._history = PrefixHistory(block_size, num_blocks)

    def emptied(self) -> "BlockManager":
        """A new manager of the same size, with all blocks free and uncached."""
        pool, host = self.pool, self.host
        return BlockManager(pool.num_blocks, self.block_size, self.prefix_cache, host.num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-num_tokens // self.block_size)

    # ---- prefixes ------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """The longest cached prefix of `token_ids`, at most `limit` tokens.

        A block that an uncommitted step writes can be shared but not copied, because a step copies
        blocks before it computes. A partial match in such a block is dropped.
        """
        match = self.index.match(token_ids, limit, salt)
        return self.whole(match) if match.partial in self.unwritten else match

    def report(
        self, token_ids: Sequence[int], num_cached: int, salt: str, reads: bool = True
    ) -> PrefixReport:
        """Why prompt tokens missed the cache; `reads`: whether the request uses the cache."""
        if self.prefix_cache is None or not reads:
            return PrefixReport(unread=len(token_ids))
        known = num_cached
        if len(token_ids) - num_cached <= self.block_size:  # `limit` excluded the last token
            known = max(known, self.match(token_ids, len(token_ids), salt).num_tokens)
        return self._history.report(token_ids, num_cached, known, salt)

    def cost_of(self, match: Match, num_blocks: int) -> int:
        """Free blocks that a new table of `num_blocks` blocks takes if it starts with `match`.

        Matched blocks in use cost nothing. Matched free blocks leave the free list, as does a free
        `partial` block until it is copied.
        """
        return max(num_blocks - len(match.blocks), 0) + sum(map(self.pool.is_free, match.held))

    def whole(self, match: Match) -> Match:
        """The match without its partial block."""
        num_tokens = len(match.blocks) * self.block_size
        return match._replace(num_tokens=num_tokens, partial=None)

    def adopt(self, table: BlockTable, match: Match, token_ids: Sequence[int]) -> None:
        """Fill an empty table with the blocks of `match`, a cached prefix of `token_ids`."""
        table.blocks = match.held
        self.pool.share(table.blocks)
        table.num_adopted = table.num_indexed = len(match.blocks)
        table.cursor, table.epoch = match.cursor, self.epoch
        table.name = self._history.name(token_ids, len(match.blocks))

    def index_blocks(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, step: int = 0
    ) -> None:
        """Cache the table's full blocks within the first `num_computed` positions.

        These positions are committed (`step` 0), or plan `step` will compute them: then the blocks
        count as unwritten until `mark_written(step)`.
        """
        size = self.block_size
        if (table.num_indexed + 1) * size > num_computed:  # no new full block: most decode steps
            return
        if self.prefix_cache is None or table.epoch != self.epoch:
            return
        while (end := (table.num_indexed + 1) * size) <= num_computed:
            if table.num_indexed == 0:
                table.cursor, table.name = self.index.start(table.salt), 0
            tokens = tuple(token_ids[end - size : end])
            block = table.blocks[table.num_indexed]
            cursor = self.index.insert(table.cursor, tokens, block)
            if step and block in self.index:
                self.unwritten[block] = step
            if cursor is None:  # an earlier block was evicted: start again at the first one
                if not all(adopted in self.index for adopted in table.adopted):
                    table.epoch = -1  # no longer cached, perhaps because it is wrong
                    break
                table.num_indexed = 0
                continue
            table.cursor = cursor
            table.name = self._history.record(table.name, tokens, table.salt)
            table.num_indexed += 1
        self.pool.use_lost_first()

    def is_written_by(self, step: int, match: Match) -> bool:
        """Whether plan `step` writes blocks of the match: then it also writes the last block."""
        return bool(match.blocks) and self.unwritten.get(match.blocks[-1]) == step

    def mark_written(self, step: int) -> None:
        """Count the blocks of plans up to `step` as written."""
        if self.unwritten:
            self.unwritten = {block: when for block, when in self.unwritten.items() if when > step}

    def reset_prefix_cache(self) -> None:
        """Empty the prefix index. No block of a running sequence enters it again."""
        self.epoch += 1
        for block in range(self.pool.num_blocks):
            if block in self.index:
                self.index.forget(block)
        self.pool.use_lost_first()

    # ---- growing -------------------------------------------------------------------------

    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        """Free blocks that `grow` would allocate."""
        copies = self._must_copy(table, start)
        return max(self.blocks_for(end) - len(table.blocks), 0) + copies

    def num_writable(self, table: BlockTable, start: int) -> int:
        """Positions from `start` that fit into the blocks of the table and the free blocks."""
        blocks = self.pool.num_free - self._must_copy(table, start) + len(table.blocks)
        if blocks < len(table.blocks):  # no free block for the copy
            return 0
        return blocks * self.block_size - start

    def grow(self, table: BlockTable, start: int, end: int) -> BlockCopy | None:
        """Make positions `start` to `end` writable; returns the copy that must come first."""
        copy = None
        if self._must_copy(table, start):
            (target,) = self.pool.allocate(1)
            copy = BlockCopy(table.blocks[-1], target)
            table.blocks[-1] = target
            # Others may reuse the source at once: a step copies before it writes.
            self.pool.release([copy.source])
            self.num_copies += 1
        if end > len(table.blocks) * self.block_size:  # true in one of `block_size` decode steps
            table.blocks += self.pool.allocate(self.blocks_for(end) - len(table.blocks))
        return copy

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens` positions."""
        kept = self.blocks_for(num_tokens)
        if kept < len(table.blocks):
            self.pool.release(table.blocks[kept:])
            del table.blocks[kept:]

    def _must_copy(self, table: BlockTable, start: int) -> bool:
        place = start // self.block_size
        if place >= len(table.blocks):
            return False
        block = table.blocks[place]
        return self.pool.ref_counts[block] > 1 or block in self.index

    def fork(self, table: BlockTable) -> BlockTable:
        """A second table that shares all blocks."""
        self.pool.share(table.blocks)
        return replace(table, blocks=list(table.blocks), host_blocks=[])

    # ---- freeing -------------------------------------------------------------------------

    def forget(self, table: BlockTable) -> None:
        """Remove the blocks that this sequence computed from the prefix index, and add no more:
        they may be wrong. Adopted blocks stay cached."""
        table.epoch = -1
        for block in table.blocks[table.num_adopted :]:
            if block in self.index:
                self.index.forget(block)
        self.pool.use_lost_first()

    def release(self, table: BlockTable) -> None:
        """Release all blocks and reset the table."""
        self.pool.release(table.blocks)
        self.host.release(table.host_blocks)
        table.blocks, table.host_blocks = [], []
        table.cursor, table.num_adopted, table.num_indexed, table.name = None, 0, 0, 0

    def can_swap_out(self, table: BlockTable) -> bool:
        """Whether host memory has enough free blocks for the table."""
        return 0 < len(table.blocks) <= self.host.num_free

    def swap_out(self, table: BlockTable) -> list[BlockCopy]:
        """Move a table to host memory; returns the copies (device block, host block)."""
        table.host_blocks = self.host.allocate(len(table.blocks))
        moves = list(map(BlockCopy, table.blocks, table.host_blocks))
        self.pool.release(table.blocks)
        table.blocks = []
        return moves

    def swap_in(self, table: BlockTable) -> list[BlockCopy]:
        """Move a table back to the device; returns the copies (host block, device block)."""
        table.blocks = self.pool.allocate(len(table.host_blocks))
        moves = list(map(BlockCopy, table.host_blocks, table.blocks))
        self.host.release(table.host_blocks)
        table.host_blocks = []
        table.num_adopted = table.num_indexed = 0  # new blocks: cache them from the first
        return moves


def make_index(prefix_cache: str | None, block_size: int) -> PrefixIndex:
    """The prefix index for an engine's `prefix_cache`: "hash", "radix", or None: it stays empty."""
    return RadixTree(block_size) if prefix_cache == "radix" else HashChain(block_size)
