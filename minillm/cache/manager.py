"""Block tables: which blocks hold a sequence, and what happens to them as it grows.

    positions   0 ............. num_computed ......... end
    blocks      [ full ][ full ][ partly filled ][ new  ]
                 shared, maybe   copied first, if   allocated by
                 cached          shared or cached   `grow`

A table only ever grows at its end, with one exception: its partly filled last block is replaced by
a copy, when somebody else can read it too (copy-on-write). Full blocks are never written again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minillm.api.outputs import PrefixReport
from minillm.cache.blocks import AccountingError, BlockPool
from minillm.cache.hash_chain import HashChain
from minillm.cache.misses import PrefixHistory
from minillm.cache.prefix import Cursor, Match, NoPrefixCache, PrefixIndex
from minillm.cache.radix import RadixTree


class BlockCopy(NamedTuple):
    """Copy the contents of one block to another, before anything is written in this step."""

    source: int
    target: int


@dataclass(slots=True)
class BlockTable:
    """The blocks of one sequence, on the device or, while it is swapped out, in host memory.

    The first `num_adopted` were computed by others and found in the prefix cache. `cursor`,
    `num_indexed` and `name` say how far its full blocks are in the prefix index. `epoch` counts
    the resets of the prefix cache before its first block: an older one is not indexed any more,
    and neither is one with -1, whose contents are in doubt.
    """

    salt: str = ""
    blocks: list[int] = field(default_factory=list)
    host_blocks: list[int] = field(default_factory=list)
    num_adopted: int = 0
    cursor: Cursor = None
    num_indexed: int = 0
    name: int = 0
    epoch: int = 0

    @property
    def adopted(self) -> list[int]:
        """Blocks that others computed."""
        return self.blocks[: self.num_adopted]


class BlockManager:
    """All blocks of an engine: `num_blocks` of `block_size` tokens, and `num_host_blocks` to which
    sequences are swapped out. `prefix_cache` is "hash", "radix" or None."""

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
        self.host = BlockPool(num_host_blocks, NoPrefixCache())
        self.num_copies = 0
        self.epoch = 0
        self.coming: dict[int, int] = {}  # findable blocks, with the step that will write them
        self.prefix_cache = prefix_cache
        self._history = PrefixHistory(block_size, num_blocks)

    def emptied(self) -> "BlockManager":
        """One of the same size, in which nothing is held or cached."""
        pool, host = self.pool, self.host
        return BlockManager(pool.num_blocks, self.block_size, self.prefix_cache, host.num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    # ---- prefixes ------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], limit: int, salt: str) -> Match:
        """The longest cached start of `token_ids`, at most `limit` tokens. A block that is still to
        be written can be shared, but not copied: a step copies before it computes."""
        match = self.index.match(token_ids, limit, salt)
        return self.whole(match) if match.partial in self.coming else match

    def report(
        self, token_ids: Sequence[int], num_cached: int, salt: str, reads: bool = True
    ) -> PrefixReport:
        """Why the rest of a prompt was not found; `reads` is whether anybody looked."""
        if self.prefix_cache is None or not reads:
            return PrefixReport(unread=len(token_ids))
        known = num_cached
        if len(token_ids) - num_cached <= self.block_size:  # the limit may have cut the match
            known = max(known, self.match(token_ids, len(token_ids), salt).num_tokens)
        return self._history.report(token_ids, num_cached, known, salt)

    def cost_of(self, match: Match, num_blocks: int) -> int:
        """Free blocks that a table of `num_blocks` takes if it begins so: a hit in a free block
        takes that off the free list, and a partial hit needs its source until it is copied."""
        return max(num_blocks - len(match.blocks), 0) + sum(map(self.pool.is_free, match.held))

    def whole(self, match: Match) -> Match:
        """The match without its partial block."""
        num_tokens = len(match.blocks) * self.block_size
        return match._replace(num_tokens=num_tokens, partial=None)

    def adopt(self, table: BlockTable, match: Match, token_ids: Sequence[int]) -> None:
        """Begin an empty table with the blocks of a prefix of `token_ids`."""
        table.blocks = match.held
        self.pool.share(table.blocks)
        table.num_adopted = table.num_indexed = len(match.blocks)
        table.cursor, table.epoch = match.cursor, self.epoch
        table.name = self._history.name(token_ids, len(match.blocks))

    def index_blocks(
        self, table: BlockTable, token_ids: Sequence[int], num_computed: int, step: int = 0
    ) -> None:
        """Make the blocks findable that are full now, or once plan `step` is carried out. Only
        tokens that are certain may be here."""
        size = self.block_size
        if (table.num_indexed + 1) * size > num_computed:  # in most decode steps
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
                self.coming[block] = step
            if cursor is None:  # a block before it was forgotten
                if not all(each in self.index for each in table.adopted):
                    table.epoch = -1  # what it adopted is in doubt, and not its own to offer
                    break
                table.num_indexed = 0
                continue
            table.cursor = cursor
            table.name = self._history.record(table.name, tokens, table.salt)
            table.num_indexed += 1
        self.pool.use_lost_first()

    def comes_with(self, step: int, match: Match) -> bool:
        """Whether plan `step` writes some of these blocks: the last of them, then."""
        return bool(match.blocks) and self.coming.get(match.blocks[-1]) == step

    def settle(self, step: int) -> None:
        """The plan was carried out: what it wrote is there."""
        if self.coming:
            self.coming = {block: when for block, when in self.coming.items() if when > step}

    def reset_prefix_cache(self) -> None:
        """Make nothing findable that was computed so far. Running sequences keep their blocks, and
        neither these nor what is computed from them become findable again."""
        self.epoch += 1
        for block in range(self.pool.num_blocks):
            if block in self.index:
                self.index.forget(block)
        self.pool.use_lost_first()

    # ---- growing -------------------------------------------------------------------------

    def num_needed(self, table: BlockTable, start: int, end: int) -> int:
        """Free blocks that `grow` would take."""
        copies = self._must_copy(table, start)
        return max(self.blocks_for(end) - len(table.blocks), 0) + copies

    def num_writable(self, table: BlockTable, start: int) -> int:
        """Positions from `start` that could be written with the blocks that are free."""
        blocks = self.pool.num_free - self._must_copy(table, start) + len(table.blocks)
        if blocks < len(table.blocks):  # not even for the copy
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
        if end > len(table.blocks) * self.block_size:  # in one of block_size decode steps
            table.blocks += self.pool.allocate(self.blocks_for(end) - len(table.blocks))
        return copy

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks at the end that hold none of the first `num_tokens` positions."""
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
        """A second table over the same blocks."""
        self.pool.share(table.blocks)
        return BlockTable(
            table.salt,
            list(table.blocks),
            num_adopted=table.num_adopted,
            cursor=table.cursor,
            num_indexed=table.num_indexed,
            name=table.name,
            epoch=table.epoch,
        )

    # ---- letting go ----------------------------------------------------------------------

    def forget(self, table: BlockTable) -> None:
        """What this sequence computed may be wrong, and is not found any more, nor offered again;
        the blocks that it adopted are as right as before."""
        table.epoch = -1
        for block in table.blocks[table.num_adopted :]:
            if block in self.index:
                self.index.forget(block)
        self.pool.use_lost_first()

    def release(self, table: BlockTable) -> None:
        """Give everything back."""
        self.pool.release(table.blocks)
        self.host.release(table.host_blocks)
        table.blocks, table.host_blocks = [], []
        table.cursor, table.num_adopted, table.num_indexed, table.name = None, 0, 0, 0

    def can_swap_out(self, table: BlockTable) -> bool:
        """Whether host memory has room for the table."""
        return 0 < len(table.blocks) <= self.host.num_free

    def swap_out(self, table: BlockTable) -> list[BlockCopy]:
        """Move a table to host memory; returns the copies (device block, host block)."""
        table.host_blocks = self.host.allocate(len(table.blocks))
        moves = list(map(BlockCopy, table.blocks, table.host_blocks))
        self.pool.release(table.blocks)
        table.blocks = []
        return moves

    def swap_in(self, table: BlockTable) -> list[BlockCopy]:
        """Bring a table back; returns the copies (host block, device block)."""
        table.blocks = self.pool.allocate(len(table.host_blocks))
        moves = list(map(BlockCopy, table.host_blocks, table.blocks))
        self.host.release(table.host_blocks)
        table.host_blocks = []
        table.num_adopted = table.num_indexed = 0  # its own copies; offer them from the start
        return moves

    def check_invariants(self, tables: Iterable[BlockTable]) -> None:
        """Compare the pools with all tables there are, and the tables with each other.

        Raises:
            AccountingError: the books do not add up; the message names the block.
        """
        tables = list(tables)
        self.pool.check_invariants([table.blocks for table in tables])
        self.host.check_invariants([table.host_blocks for table in tables])
        places: dict[int, int] = {}
        for table in tables:
            for place, block in enumerate(table.blocks):
                if places.setdefault(block, place) != place:
                    raise AccountingError(
                        f"Block {block} is shared at places {places[block]} and {place}."
                    )


def make_index(prefix_cache: str | None, block_size: int) -> PrefixIndex:
    """The prefix cache of this name."""
    if prefix_cache is None:
        return NoPrefixCache()
    return HashChain(block_size) if prefix_cache == "hash" else RadixTree(block_size)
