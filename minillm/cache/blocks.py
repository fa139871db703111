"""The block pool: a reference count per KV cache block, and the free list with its eviction order.

          allocate (from the front)            release (reference count 0)
    free -------------------------->  in use -----------------------------> free
         -------------------------->          uncached blocks: to the front
          share (prefix hit, from             cached blocks: to the back, so that
          anywhere in the list)               the least recently used is evicted first

The pool holds no tensors: they are in `layers/kv_cache.py`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from minillm.cache.prefix import PrefixIndex


class AccountingError(RuntimeError):
    """The scheduler's or block pool's internal state is inconsistent: a bug of minillm."""


class BlockPool:
    """Reference counts of `num_blocks` blocks, and the free list.

    A free block may still be cached: a prefix hit can share it until it is allocated again. In an
    OrderedDict, removal at either end or in the middle takes constant time.
    """

    def __init__(self, num_blocks: int, index: PrefixIndex):
        self.num_blocks = num_blocks
        self.ref_counts = [0] * num_blocks
        self.num_revived = 0  # free blocks that a prefix hit put back into use
        self.num_evicted = 0  # cached blocks that were allocated for new contents
        self._index = index
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Number of free blocks, cached ones included."""
        return len(self._free)

    def is_free(self, block: int) -> bool:
        """Whether the block's reference count is 0."""
        return self.ref_counts[block] == 0

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the front of the free list, and evict cached ones among them."""
        if count > len(self._free):
            raise AccountingError(f"{count} blocks were requested, but {len(self._free)} are free.")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.ref_counts[block] = 1
            if block in self._index:
                self._index.forget(block)
                self.num_evicted += 1
        self.use_lost_first()
        return blocks

    def use_lost_first(self) -> None:
        """Move free blocks that the index dropped (`index.lost`) to the front of the free list."""
        lost = self._index.lost
        while lost:
            block = lost.pop()
            if block in self._free:
                self._free.move_to_end(block, last=False)

    def share(self, blocks: Iterable[int]) -> None:
        """Increment the reference count of each block, and take free ones off the free list."""
        for block in blocks:
            if self.ref_counts[block] == 0:
                del self._free[block]
                self.num_revived += 1
            self.ref_counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Decrement the reference counts of a block table.

        The last block is freed first, and so evicted first: more prompts share the first blocks.
        """
        for block in reversed(blocks):
            if self.ref_counts[block] < 1:
                raise AccountingError(f"Block {block} was released, but its reference count is 0.")
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._index:
                    self._free.move_to_end(block, last=False)
