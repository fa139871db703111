"""A pin goes all the way up, so one sum tells whether an eviction is possible.

A request pins its block and all blocks above it. So no pinned block is below a block without a pin,
and all blocks without pins can be evicted in the end, leaves first. Their number therefore tells
before any removal whether `count` is possible.

The same holds for uses: the last use of a parent is never before that of its children. So the order
of last use alone would nearly be enough, except for equal times. But a request uses a whole path at
one moment, so equal times are usual, and only "leaves first" keeps the beginning of a text in the
cache until no block is left below it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Node:
    """What is known about a block."""

    parent: int | None
    used: int
    pins: int = 0
    children: int = 0


class BlockTree:
    """A tree of cached blocks, each below the block before it in the text."""

    def __init__(self) -> None:
        """Make a tree without blocks."""
        self.nodes: dict[int, Node] = {}

    def path(self, block: int | None) -> Iterator[Node]:
        """A block and all above it, up to the top."""
        while block is not None:
            node = self.nodes[block]
            yield node
            block = node.parent

    def add(self, block: int, parent: int | None, now: int) -> None:
        """Add a block below `parent`, or at the top; it and all blocks above it are used now."""
        self.nodes[block] = Node(parent, now)
        for node in self.path(parent):
            node.used = now
        if parent is not None:
            self.nodes[parent].children += 1

    def start(self, block: int, now: int) -> None:
        """Start a request, which uses and pins this block and all blocks above it."""
        for node in self.path(block):
            node.used = now
            node.pins += 1

    def finish(self, block: int) -> None:
        """End a request that started with this block, and remove its pins."""
        for node in self.path(block):
            node.pins -= 1

    def evict(self, count: int) -> list[int]:
        """Remove `count` blocks, the leaf with the earliest last use first; return their numbers.

        Of equal ones, remove the smaller number first. If too few can be removed, return [].
        """
        free = {block: node for block, node in self.nodes.items() if node.pins == 0}
        if count > len(free):
            return []
        leaves = [(node.used, block) for block, node in free.items() if node.children == 0]
        heapq.heapify(leaves)
        gone: list[int] = []
        while len(gone) < count:
            block = heapq.heappop(leaves)[1]
            gone.append(block)
            parent = self.nodes.pop(block).parent
            if parent is not None:
                node = self.nodes[parent]
                node.children -= 1
                if node.children == 0 and node.pins == 0:
                    heapq.heappush(leaves, (node.used, parent))
        return gone
