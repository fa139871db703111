"""The blocks above are not changed: `evict` computes what they inherit from the blocks below.

A use and a running request are stored only at the block that was named. A parent is always older in
the dict than its children, so one walk from the youngest block to the oldest passes both up before
any block is removed. A block without a pin has no pinned block below it, so it can be removed in
the end: the number of such blocks shows whether `count` is possible.
"""

import heapq
from collections import Counter


class BlockTree:
    """A tree of cached blocks, each below the block before it in the text."""

    def __init__(self) -> None:
        """Make a tree without blocks."""
        self.above: dict[int, int | None] = {}  # oldest first
        self.used: dict[int, int] = {}  # when it, or one below it, was named last
        self.running: Counter[int] = Counter()  # requests, by the block they were started with

    def add(self, block: int, parent: int | None, now: int) -> None:
        """Add a block below `parent`, or at the top; it and all blocks above it are used now."""
        self.above[block] = parent
        self.used[block] = now

    def start(self, block: int, now: int) -> None:
        """Start a request, which uses and pins this block and all blocks above it."""
        self.used[block] = now
        self.running[block] += 1

    def finish(self, block: int) -> None:
        """End a request that started with this block, and remove its pins."""
        self.running[block] -= 1

    def evict(self, count: int) -> list[int]:
        """Remove `count` blocks, the earliest last use first; return their numbers."""
        busy = {block for block, requests in self.running.items() if requests}
        below: Counter[int | None] = Counter()
        for block, parent in reversed(self.above.items()):
            below[parent] += 1
            if parent is not None:
                self.used[parent] = max(self.used[parent], self.used[block])
                busy |= {parent} if block in busy else set()
        if count > len(self.above) - len(busy):
            return []
        leaves = [(self.used[b], b) for b in self.above if not below[b] and b not in busy]
        heapq.heapify(leaves)
        gone: list[int] = []
        while len(gone) < count:
            _, block = heapq.heappop(leaves)
            gone.append(block)
            parent = self.above.pop(block)
            below[parent] -= 1
            if parent is not None and not below[parent] and parent not in busy:
                heapq.heappush(leaves, (self.used[parent], parent))
        return gone
