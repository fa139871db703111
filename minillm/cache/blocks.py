"""Fixed-size blocks of KV memory: who holds which, and in which order the free ones are reused.

                allocate                        release by the last holder
    free  ------------------->  held  ---------------------------------->  free
    front: used next             ^                                    uncached: at the front
                                 |  share: a prefix hit               cached: at the back
                                 +--- revives a free block, ---------  (the least recently
                                      wherever it stands               used is evicted first)

Only counting happens here; what a block looks like is known to `layers/kv_cache.py`.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from minillm.cache.prefix import PrefixIndex


class AccountingError(RuntimeError):
    """The engine's own books do not add up: always a bug of minillm, never of its user."""


class BlockPool:
    """Reference counts of `num_blocks` blocks, and a list of the free ones.

    A free block may still be cached: its contents stay findable through the prefix index until it
    is needed for something else. An OrderedDict is the doubly linked list that this takes: both
    ends and any place in the middle are reached in constant time.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_revived = 0  # free blocks that a prefix hit took back into use
        self.num_evicted = 0  # cached blocks that were reused for something else
        self._index = index
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give, cached ones included."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether nobody holds the block."""
        return self.ref_counts[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks; the caller is their only holder."""
        if count > len(self._free):
            raise AccountingError(f"{count} blocks were asked for; {len(self._free)} are free.")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
            if block in self._index:
                self._index.forget(block)
                self.num_evicted += 1
        self.use_lost_first()
        return blocks

    def use_lost_first(self) -> None:
        """Free blocks that the index gave up by itself are worth nothing: to the front."""
        lost = self._index.lost
        while lost:
            block = lost.pop()
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def share(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more; a free one leaves the free list."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
                self.num_revived += 1
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Let blocks go. The end of a sequence is freed first, so that it is evicted before its
        beginning, which more prompts share."""
        for block in reversed(blocks):
            if self.ref_counts[block] < 1:
                raise AccountingError(f"Block {block} was released, but nobody holds it.")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._index:
                    self._free.move_to_end(block, last=False)

    def check_invariants(self, tables: Iterable[Sequence[int]]) -> None:
        """Compare the books with all block tables there are.

        Raises:
            AccountingError: a table names a free block, a reference count is not the number of
                tables that hold the block, or a table holds a block twice.
        """
        holders: Counter[int] = Counter()
        for table in tables:
            holders.update(table)
            if len(set(table)) < len(table):
                raise AccountingError(f"A table holds a block twice: {list(table)}.")
        for block, count in enumerate(self.ref_counts):
            if count != holders[block]:
                raise AccountingError(f"Block {block}: {count} references, {holders[block]} held.")
            if (count == 0) != (block in self._free):
                raise AccountingError(f"Block {block}: {count} references, but free: {count > 0}.")
        unknown = set(holders) - set(range(self.num_blocks))
        if unknown:
            raise AccountingError(f"Tables name blocks that do not exist: {sorted(unknown)}.")
